"""What the HTTP layer needs of the head: a narrow door, to test the API without a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import msgspec

from moonpool.engine.tokenizer import Tokenizer
from moonpool.types import FinishReason, Request, RequestId, Slo, Struct, Token


class ModelCard(Struct, frozen=True):
    """What clients may know of the served model."""

    model_id: str
    created_s: int
    max_model_tokens: int  # prompt + answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, float] = msgspec.field(default_factory=dict)
    """How tokens are drawn where a request does not say, by the names of `SamplingParams`."""


class Output(Struct, frozen=True):
    """One increment of an answer. The last one has a `finish_reason`."""

    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens not computed anew; valid from the first output on
    timings_s: dict[str, float] | None = None  # stage -> seconds, on the last output


class Refused(Exception):  # noqa: N818 (not a fault)
    """The request was not, or could not be, answered. Becomes one HTTP error.

    `status`: 429 (SLO or share refuses), 503 (no capacity, instance lost), 504 (deadline), 400.
    `projection`: the numbers behind a refusal, such as `predicted_ttft_s` and `limit_ttft_s`.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        projection: dict[str, float] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.projection = projection


class Frontend(Protocol):
    """The head, as the HTTP layer sees it. All methods are called on the head's event loop."""

    card: ModelCard
    tokenizer: Tokenizer
    default_slo: Slo
    request_timeout_s: float
    now: Callable[[], float]

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Yields outputs until one has a finish reason. Raises `Refused` instead, at any point.

        Closing the iterator early (client gone, stop string seen) aborts the request everywhere.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Ends a request early. Unknown ids are ignored."""
        ...

    def explain(self, request_id: str) -> dict[str, Any] | None: ...

    def cluster(self) -> dict[str, Any]: ...

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        """The most used first; waits a moment for what the instances say."""
        ...

    def drain(self, instance_id: str, within_s: float) -> str:
        """Begins to; or says in one line why it cannot be. "" if all is well."""
        ...

    def beliefs(self) -> dict[str, Any]:
        """What `simulate --beliefs` reads."""
        ...

    def server_info(self) -> dict[str, Any]: ...

    def healthy(self) -> bool: ...

    def metrics_text(self) -> bytes:
        """Prometheus exposition of the head (which includes what the workers reported)."""
        ...

"""What the HTTP layer is built on: the head as a protocol, and the operator's options."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from moonpool.api.keys import TenantLimits
from moonpool.config.slo import SloConfig
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import Parsing
from moonpool.refusal import Refusal
from moonpool.text.tokenizer import Tokenizer, TokenizerParts
from moonpool.types import FinishReason, Pooling, Request, RequestId, Struct, Token


class AdapterCard(Struct, frozen=True):
    """One LoRA adapter: its name for clients, the value of `Request.adapter`, and its folder."""

    name: str
    adapter: str
    root: str


class ModelCard(Struct, frozen=True):
    """The properties of the served model that clients may see."""

    model_id: str
    created_s: int
    max_model_tokens: int  # prompt and output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    scores_prompts: bool = False  # the engine can compute the logprobs of a prompt's tokens
    embedding_size: int = 0  # numbers in an embedding; 0 means that the engine computes none
    no_embeddings: str = ""  # why it computes none
    pooling: Pooling = "last"
    grammar_waits: bool = True
    """A grammar holds what comes behind the reasoning. False: the engine itself decides that."""
    adapters: tuple[AdapterCard, ...] = ()
    root: str = ""  # the folder or id of its weights; "" means the `model_id`
    other_names: tuple[str, ...] = ()  # that clients may use, too
    aliases: tuple[str, ...] = ()  # likewise, but not listed
    generates: bool = True
    forwards: tuple[str, ...] = ()
    """Endpoints whose calls go to its vLLM servers as they are (see `forwarding`)."""
    forwards_all: bool = False
    """All calls go to its servers as they are: one takes no token ids, or they are unknown here."""
    parses: tuple[Parsing, ...] = ()
    """What all its vLLM servers find in their answers; chats with it go to them as they are."""
    sampling: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Defaults for the sampling fields that a request leaves out, by name of `SamplingParams`."""
    system_fingerprint: str = ""  # of what answers follow from, beside the request

    @property
    def knows_tokens(self) -> bool:
        """Whether the tokenizer is the model's own, and no stand-in."""
        return self.vocab_size > 0

    def adapter_of(self, name: str | None) -> str:
        """Returns what `Request.adapter` is for a model's name; "" for the model itself."""
        found = (card.adapter for card in self.adapters if card.name == name)
        return next(found, "")


class Output(Struct, frozen=True):
    """One increment of a response. The last one has a `finish_reason`."""

    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens from the prefix cache; valid from the first output on
    timings_s: dict[str, float] | None = None  # stage -> seconds, on the last output


class RequestRefused(Exception):  # noqa: N818 (not a fault)
    """The request was rejected, or failed. Becomes one HTTP error.

    `is_counted`: the head has counted it.
    """

    is_counted = False

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        projection: dict[str, float] | None = None,
    ):
        super().__init__(message)
        self.refusal = Refusal(status, reason, message, retry_after_s, projection)

    @staticmethod
    def of(refusal: Refusal, is_counted: bool) -> RequestRefused:
        told = refusal.status, refusal.reason, refusal.message, refusal.retry_after_s
        error = RequestRefused(*told, refusal.projection)
        error.is_counted = is_counted
        return error


class ModelBackend(Protocol):
    """One model of the head, as the endpoints that compute see it. All methods are called on the
    head's event loop."""

    @property
    def card(self) -> ModelCard:
        """Replaced by another one when an instance joins that changes it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def slo(self) -> SloConfig: ...

    @property
    def request_timeout_s(self) -> float: ...

    def now(self) -> float: ...

    def options(self, shared: ApiOptions) -> ApiOptions:
        """Returns the server's options with those of this model."""
        ...

    def submit(
        self, request: Request, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        """Yields outputs until one has a finish reason. May raise `RequestRefused` at any point.

        `delivered`: the tokens that the client has from another head, or None if the request is
        new.

        Closing the iterator early (the client is gone) aborts the request everywhere, unless
        `finish` has ended it.
        """
        ...

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        """Submits, as `submit` does, a request that a vLLM server answers from the client's own
        body. Each token of an output has a part of the response as its `payload`."""
        ...

    def why_not_forwarded(self) -> str:
        """Returns why no call can be forwarded now; "" if calls can."""
        ...

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        """The answer is complete after `num_tokens` tokens, because a stop string ends it. The
        engine need not know of it: it goes on, or has just ended the answer for another reason.
        Returns the seconds of each stage."""
        ...

    def abort(self, request_id: RequestId, reason: str = FinishReason.ABORT.value) -> None:
        """Ends a request early. Its client gets no whole answer, even if it has just ended. Unknown
        ids are ignored."""
        ...

    def stage(self, request_id: RequestId) -> str:
        """Returns what a request does now, such as "prefill"; "" if it is not placed yet, and may
        be refused."""
        ...

    def note_refused(self, reason: str) -> None:
        """Counts a call that the HTTP layer refused before it became requests."""
        ...

    def note_answered(self, lengths: Sequence[int]) -> None:
        """Counts a prompt whose choices all have an answer, of these lengths in tokens."""
        ...


class ServingBackend(Protocol):
    """The head as the HTTP layer sees it. All methods are called on the head's event loop."""

    @property
    def request_timeout_s(self) -> float: ...

    def now(self) -> float: ...

    def models(self) -> Sequence[ModelBackend]:
        """Returns the models that can be asked for; the first one is the default."""
        ...

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Returns the record of a request, or None if it is unknown."""
        ...

    def cluster(self, tenant: str | None = None) -> dict[str, Any]:
        """Describes the cluster; for a tenant only what concerns it."""
        ...

    def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        """Describes the cluster and its recent requests for the live page."""
        ...

    def is_stopping(self) -> bool:
        """Whether long streams should end, because the server does."""
        ...

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        """Returns the most used prefixes first. Waits a moment for the instances' reports."""
        ...

    def note_refused(self, reason: str) -> None:
        """Like the model's `note_refused`, for a request whose model is not known yet."""
        ...

    def drop_cached_blocks(self) -> None:
        """Lets all instances forget the cached blocks that no request holds."""
        ...

    def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        """Begins to drain an instance. Returns "", or why it cannot be drained. `returns`: another
        process, from the code on disk, takes its place."""
        ...

    def upgrade(self) -> None:
        """Lets a head from the code on disk take this one's place."""
        ...

    def beliefs(self, name: str | None = None) -> dict[str, Any]:
        """Returns the learned cost corrections, which `simulate --beliefs` reads. `name`: of a
        model; None means the default."""
        ...

    def event_log(self, name: str | None = None) -> bytes | None:
        """Returns the last events of a model's Conductor, as `moonpool rewind` reads them, or None
        if there is no such model."""
        ...

    def server_info(self) -> dict[str, Any]: ...

    def not_ready(self) -> str:
        """Returns why requests are not served now; "" if they are."""
        ...

    def metrics_text(self) -> bytes:
        """Returns the Prometheus text of the head, with the workers' reported counters."""
        ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Settings of the HTTP layer, checked when they are made.

    `api_keys` maps a bearer key to its tenant. If it is empty, the server needs no key.
    `served_names` are the names that clients may use for the model. If it is empty, only the model
    card's own id is valid.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    """Tenants that see the whole cluster. Without API keys, every client does."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)  # by tenant
    served_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # whose web pages may call the API; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names of a server without keys besides its own
    max_body_bytes: int = 32 << 20
    max_choices: int = 128  # prompts x n of one call
    max_logprobs: int = 20
    thread_above_chars: int = 16_384  # longer texts are tokenised in a thread
    body_timeout_s: float = 30.0
    tokenizer: str = ""
    """Names the tokenizer for the processes that read bodies; "" means that there are none."""
    tokenizer_parts: TokenizerParts | None = None
    """What it is made from, if its file is not a folder."""
    keepalive_s: float = 5.0  # how often a silent stream sends a comment; 0 means never
    exports_traces: bool = False
    strict_max_tokens: bool = False
    """Refuse a limit on output tokens beyond the room in the context, instead of lowering it."""
    tool_call_parser: str = "auto"  # the format of calls (see `output_text.formats`)
    reasoning_parser: str = "auto"  # that of reasoning
    chat_template: str = ""
    """The source of a template that is used in place of the tokenizer's own."""

    def names(self, card: ModelCard) -> tuple[str, ...]:
        """Returns the names of models that clients may use, the model's own first."""
        own = self.served_names or (card.model_id, *card.other_names)
        return own + tuple(a.name for a in card.adapters)

    def accepted(self, card: ModelCard) -> tuple[str, ...]:
        """Returns `names`, and those that are not listed."""
        return self.names(card) + (() if self.served_names else card.aliases)

    def __post_init__(self) -> None:
        if self.keepalive_s < 0:
            raise ValueError(f"api.keepalive_s must be 0 or more, not {self.keepalive_s}")
        for name in ("max_body_bytes", "max_choices", "thread_above_chars", "body_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"api.{name} must be above 0, not {getattr(self, name)}")
        for key, tenant in self.api_keys.items():
            if not key or not key.isascii() or any(character.isspace() for character in key):
                raise ValueError("an API key must be non-empty ASCII text without spaces")
            if not tenant or "/" in tenant:
                raise ValueError(f"tenant {tenant!r} must be non-empty and must not hold '/'")

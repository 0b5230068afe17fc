"""The protocol by which the HTTP layer uses the head, and the operator's options."""

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
    max_model_tokens: int  # most tokens of prompt and output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    scores_prompts: bool = False  # whether the engine can compute the logprobs of a prompt's tokens
    embedding_size: int = 0  # numbers in an embedding, or 0 if the engine computes none
    no_embeddings: str = ""  # why the engine computes no embeddings
    pooling: Pooling = "last"
    grammar_waits: bool = True
    """Whether a grammar applies only to the text after the reasoning. If False, the engine itself
    decides that."""
    adapters: tuple[AdapterCard, ...] = ()
    root: str = ""  # folder or id of the weights, or "" for the `model_id`
    other_names: tuple[str, ...] = ()  # further names that clients may use
    aliases: tuple[str, ...] = ()  # further names that are not listed
    generates: bool = True
    forwards: tuple[str, ...] = ()
    """Endpoints whose calls go unchanged to the model's vLLM servers (see `forwarding`)."""
    forwards_all: bool = False
    """Whether all calls go unchanged to the servers, because a server takes no token ids, or the
    tokens are unknown here."""
    parses: tuple[Parsing, ...] = ()
    """The parts of answers that all vLLM servers of the model parse; chats that ask for these parts
    go to the servers unchanged."""
    sampling: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Defaults for the sampling fields that a request leaves out, by name of `SamplingParams`."""
    # identifies everything besides the request that determines an answer
    system_fingerprint: str = ""

    @property
    def knows_tokens(self) -> bool:
        """Whether the tokenizer is the model's own, and not a stand-in."""
        return self.vocab_size > 0

    def adapter_of(self, name: str | None) -> str:
        """Returns the value of `Request.adapter` for a model's name, or "" for the model itself."""
        found = (card.adapter for card in self.adapters if card.name == name)
        return next(found, "")


class Output(Struct, frozen=True):
    """An `Output` is one increment of a response. The last increment has a `finish_reason`."""

    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens from the prefix cache; valid from the first output on
    timings_s: dict[str, float] | None = None  # seconds by stage, in the last output


class RequestRefused(Exception):  # noqa: N818 (not a fault)
    """The request was rejected, or failed. Becomes one HTTP error.

    `is_counted`: whether the head has counted the refusal.
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
        """The card is replaced when an instance joins that changes it."""
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
        """Yields outputs until an output has a finish reason. May raise `RequestRefused` at any
        point.

        `delivered`: the tokens that the client has from another head, or None if the request is
        new.

        Closing the iterator early (because the client is gone) aborts the request everywhere,
        unless `finish` has ended it.
        """
        ...

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        """Submits, as `submit` does, a request that a vLLM server answers from the client's own
        body. The `payload` of each token of an output has a part of the response."""
        ...

    def why_not_forwarded(self) -> str:
        """Returns why no call can be forwarded now, or "" if calls can."""
        ...

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        """Notes that the answer is complete after `num_tokens` tokens, because a stop string ends
        it. The engine need not know about that: it continues, or has just ended the answer for
        another reason. Returns the seconds of each stage."""
        ...

    def abort(self, request_id: RequestId, reason: str = FinishReason.ABORT.value) -> None:
        """Ends a request early. The client gets no whole answer, even if the answer has just ended.
        Unknown ids are ignored."""
        ...

    def stage(self, request_id: RequestId) -> str:
        """Returns the present stage of a request, such as "prefill", or "" if it is not placed yet,
        and may be refused."""
        ...

    def note_refused(self, reason: str) -> None:
        """Counts a call that the HTTP layer refused before it became requests."""
        ...

    def note_answered(self, lengths: Sequence[int]) -> None:
        """Counts a prompt whose choices all have an answer; `lengths` are their tokens."""
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
        """Describes the cluster; for a tenant, describes only what concerns this tenant."""
        ...

    def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        """Describes the cluster and its recent requests for the live page."""
        ...

    def is_stopping(self) -> bool:
        """Whether long streams should end because the server is stopping."""
        ...

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        """Returns the most used prefixes first. Waits a moment for the instances' reports."""
        ...

    def note_refused(self, reason: str) -> None:
        """Like the model's `note_refused`, for a request whose model is not known yet."""
        ...

    def drop_cached_blocks(self) -> None:
        """Makes all instances forget the cached blocks that no request holds."""
        ...

    def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        """Begins to drain an instance. Returns "", or the reason why the instance cannot be
        drained. `returns`: whether another process, which runs the code on disk, takes its
        place."""
        ...

    def upgrade(self) -> None:
        """Has a head that runs the code on disk take the place of this one."""
        ...

    def beliefs(self, name: str | None = None) -> dict[str, Any] | None:
        """Returns the learned cost corrections, which `simulate --beliefs` reads. `name`: the model
        whose corrections are returned; None means the default. Returns None if there is no such
        model."""
        ...

    def event_log(self, name: str | None = None) -> bytes | None:
        """Returns the last events of a model's Conductor, as `moonpool rewind` reads them, or None
        if there is no such model."""
        ...

    def server_info(self) -> dict[str, Any]: ...

    def not_ready(self) -> str:
        """Returns why requests are not served now, or "" if they are."""
        ...

    def metrics_text(self) -> bytes:
        """Returns the Prometheus text of the head, with the workers' reported counters."""
        ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Settings of the HTTP layer, checked when they are made.

    `api_keys` maps a bearer key to its tenant. If `api_keys` is empty, the server needs no key.
    `served_names` are the names that clients may use for the model. If `served_names` is empty, the
    names in the model card are valid: its id, its other names and its aliases. Names of adapters
    are always valid.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    """Tenants that see the whole cluster. Without API keys, every client sees the whole cluster."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)  # by tenant
    served_names: tuple[str, ...] = ()
    # origins whose web pages may call the API; "*" means all
    allowed_origins: tuple[str, ...] = ()
    # further host names that are valid at a server without keys
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_choices: int = 128  # most answers (prompts x n) of one call
    max_logprobs: int = 20
    thread_above_chars: int = 16_384  # longer texts are tokenised in a thread
    body_timeout_s: float = 30.0
    tokenizer: str = ""
    """Name of the tokenizer for the processes that read bodies, or "" without such processes."""
    tokenizer_parts: TokenizerParts | None = None
    """The content of the tokenizer's file, if that is not a folder."""
    keepalive_s: float = 5.0  # how often a silent stream sends a comment; 0 means never
    exports_traces: bool = False
    strict_max_tokens: bool = False
    """Whether a limit on output tokens beyond the room in the context is refused instead of
    lowered."""
    tool_call_parser: str = "auto"  # format of tool calls (see `output_text.formats`)
    reasoning_parser: str = "auto"  # format of reasoning
    chat_template: str = ""
    """The source of a template that is used in place of the tokenizer's own."""

    def names(self, card: ModelCard) -> tuple[str, ...]:
        """Returns the names of models that clients may use, the model's own first."""
        own = self.served_names or (card.model_id, *card.other_names)
        return own + tuple(a.name for a in card.adapters)

    def accepted(self, card: ModelCard) -> tuple[str, ...]:
        """Returns `names`, and further names that are not listed."""
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

"""The messages between a front and the head.

    front                                                     head
      | <-- ModelKnown (for each model, when it changes) ------ |
      | <-- HeadState (whether it serves) --------------------- |  then the front accepts
      | -- FrontListens (where instances send tokens) --------> |
      | -- BeginAnswer (a request) ---------------------------> |  the Conductor decides
      | <-- AnswersGrown (the first and the last tokens) ------ |
      | <-- AnswerPlaced (what a silent request does) --------- |
      | <-- AnswerRefused ------------------------------------- |
      | -- FinishAnswer (a stop string), AbortAnswer ---------> |
      | -- CloseAnswer (nobody waits any more) ---------------> |
      | -- AdmitCall (of a tenant with limits) ---------------> |
      | <-- Told ---------------------------------------------- |
      | -- SpendTokens, CountRefused, CountAnswered ----------> |
      | -- AskHead (what `/metrics` and others show) ---------> |
      | <-- Told ---------------------------------------------- |
      | -- CopyAnswers (what a standby follows) --------------> |  to the standby
      | -- HoldAnswer, ForgetAnswer (its client is gone) -----> |  to all other fronts
      | -- FetchAnswer (its client came back here) -----------> |  to the front that has it
      | <-- FetchAnswer, -- AnswerFetched --------------------> |

All other tokens come from the instances (`protocol.direct_tokens`); an instance that cannot reach
the front sends them by the head. Each part's position tells its place in the answer. The front's
state is authoritative: if an attempt continues after other tokens than the client has, the front
begins the request again.

The front gives each answer a number. The head forgets all answers of a front that is gone; the next
front sends them again with the tokens that their clients have. A front whose head is gone sends its
answers again to the next head.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moonpool.api.serving_backend import ModelCard
from moonpool.protocol.frames import AnswersCopied
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import ModelOffer
from moonpool.refusal import Refusal
from moonpool.types import FinishReason, Request, Struct, Token

Question = Literal[
    "explain",
    "cluster",
    "live_view",
    "hot_prefixes",
    "drop_cached_blocks",
    "drain",
    "upgrade",
    "beliefs",
    "event_log",
    "server_info",
    "metrics_text",
    "num_calls",
]


class _Message(Struct, frozen=True, array_like=True, tag=True):
    """Encoded as an array, because messages carry tokens."""


# Messages to the head


class BeginAnswer(_Message, frozen=True, tag=True):
    """A client waits for an answer at the front. `model`: the key of the model. `delivered`,
    `call`: as in `ModelBackend.submit` and `forward`."""

    number: int
    model: str
    request: Request
    delivered: tuple[int, ...] | None = None
    call: ForwardedCall | None = None


class CloseAnswer(_Message, frozen=True, tag=True):
    """No client waits for the answer any more: it is cancelled, if it has not ended."""

    number: int


class AbortAnswer(_Message, frozen=True, tag=True):
    """Like `ModelBackend.abort`."""

    number: int
    reason: str


class FinishAnswer(_Message, frozen=True, tag=True):
    """Like `ModelBackend.finish`."""

    number: int
    reason: FinishReason
    num_tokens: int


class FrontListens(_Message, frozen=True, tag=True):
    """Instances may send tokens directly to this port. `front`: the name of this process."""

    front: str
    port: int


class CountRefused(_Message, frozen=True, tag=True):
    """A front refused a call; the head counts it. `model`: the key of the model, or None before it
    is known."""

    model: str | None
    reason: str


class CountAnswered(_Message, frozen=True, tag=True):
    """Like `ModelBackend.note_answered`."""

    model: str
    lengths: tuple[int, ...]


class AdmitCall(_Message, frozen=True, tag=True):
    """Asks whether a tenant with limits may make a call now. `Told` has the reason if it may
    not."""

    number: int
    tenant: str
    arrived_s: float


class SpendTokens(_Message, frozen=True, tag=True):
    """Counts tokens of tenants with limits; negative numbers give tokens back."""

    spent: dict[str, int]


class AskHead(_Message, frozen=True, tag=True):
    """A question of `ClusterView`; `Told` has the answer."""

    number: int
    question: Question
    arguments: tuple[Any, ...] = ()


# Messages to a standby, passed on by the head


class CopyAnswers(_Message, frozen=True, tag=True):
    """The new bytes of the logs of a front's answers."""

    copied: AnswersCopied


# Messages to other fronts, passed on by the head


class AnswerName(Struct, frozen=True, array_like=True):
    """The name by which a call is recognised when it comes again."""

    tenant: str
    request_id: str
    digest: bytes


class HoldAnswer(_Message, frozen=True, tag=True):
    """A front holds this answer, whose client has lost its connection and may come back."""

    name: AnswerName


class ForgetAnswer(_Message, frozen=True, tag=True):
    """The front no longer holds the answer."""

    name: AnswerName


class FetchAnswer(_Message, frozen=True, tag=True):
    """Asks for an answer whose client has come back over another front. `displaces`: as in
    `KeptAnswers.find`."""

    number: int
    name: AnswerName
    displaces: bool


class AnswerFetched(_Message, frozen=True, tag=True):
    """The log of an answer from a front that has now dropped it; b"" means that it had none."""

    number: int
    known: bytes


# Messages to the front


class ModelKnown(_Message, frozen=True, tag=True):
    """A model of the head, and its place among the head's models. `offer`: the offer from which the
    model is read, or None if the configuration names it. `no_forwarding`: as
    `ModelBackend.why_not_forwarded`."""

    model: str
    place: int
    card: ModelCard
    offer: ModelOffer | None
    no_forwarding: str


class HeadState(_Message, frozen=True, tag=True):
    """The values of `ServingBackend.not_ready` and `ServingBackend.is_stopping` at the head.
    `wants_copies`: whether a standby follows the answers under way."""

    not_ready: str
    is_stopping: bool
    wants_copies: bool = False


class AnswerPart(Struct, frozen=True, array_like=True):
    """More tokens of one answer; see `Output`. `position`: the number of the answer's tokens before
    these, including tokens that the client has from another head."""

    number: int
    position: int
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    timings_s: dict[str, float] | None = None


class AnswersGrown(_Message, frozen=True, tag=True):
    """The new tokens of all answers of a front in one turn of the head's loop."""

    parts: tuple[AnswerPart, ...]


class AnswerPlaced(_Message, frozen=True, tag=True):
    """The stage of a request without a token; see `ModelBackend.stage`."""

    number: int
    stage: str


class ToldRefusal(Refusal, frozen=True):
    """Like `RequestRefused`."""

    is_counted: bool = False


class AnswerRefused(_Message, frozen=True, tag=True):
    number: int
    refusal: ToldRefusal


class Told(_Message, frozen=True, tag=True):
    """The answer to a question, as msgpack, or the reason for a refusal."""

    number: int
    value: bytes = b""
    refusal: ToldRefusal | None = None


FromFront = (
    FrontListens
    | BeginAnswer
    | CloseAnswer
    | AbortAnswer
    | FinishAnswer
    | CountRefused
    | CountAnswered
    | AdmitCall
    | SpendTokens
    | AskHead
    | CopyAnswers
    | HoldAnswer
    | ForgetAnswer
    | FetchAnswer
    | AnswerFetched
)
ToFront = (
    ModelKnown
    | HeadState
    | AnswersGrown
    | AnswerPlaced
    | AnswerRefused
    | Told
    | HoldAnswer
    | ForgetAnswer
    | FetchAnswer
    | AnswerFetched
)
FROM_FRONT: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
TO_FRONT: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)

"""What crosses the border between a front and the head.

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

All other tokens come from the instances (`protocol.direct_tokens`), and those of an instance that
cannot reach the front by the head. A position orders them. The front has the truth: where an
attempt goes on from other tokens than the client has, the front begins the request again.

The front names an answer by a number of its own. The head forgets all answers of a front that is
gone; the next front sends them again with the tokens that their clients have. A front whose head is
gone does the same at the next head.
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


# To the head


class BeginAnswer(_Message, frozen=True, tag=True):
    """A client waits for an answer. `model`: its key. `delivered`, `call`: as in
    `ModelBackend.submit` and `forward`."""

    number: int
    model: str
    request: Request
    delivered: tuple[int, ...] | None = None
    call: ForwardedCall | None = None


class CloseAnswer(_Message, frozen=True, tag=True):
    """Nobody waits for the answer any more: it is cancelled, if it has not ended."""

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
    """Instances may send tokens directly to this port. `front`: names this process."""

    front: str
    port: int


class CountRefused(_Message, frozen=True, tag=True):
    """The front refused a call. `model`: None before it is known."""

    model: str | None
    reason: str


class CountAnswered(_Message, frozen=True, tag=True):
    """Like `ModelBackend.note_answered`."""

    model: str
    lengths: tuple[int, ...]


class AdmitCall(_Message, frozen=True, tag=True):
    """May a tenant with limits make a call now? `Told` has why not."""

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


# To a standby, by the head


class CopyAnswers(_Message, frozen=True, tag=True):
    """What is new of the logs of a front's answers."""

    copied: AnswersCopied


# To other fronts, by the head


class AnswerName(Struct, frozen=True, array_like=True):
    """The name by which a call is known when it comes again."""

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
    """The client has come back over another front. `displaces`: as in `KeptAnswers.find`."""

    number: int
    name: AnswerName
    displaces: bool


class AnswerFetched(_Message, frozen=True, tag=True):
    """What a front knew of the answer, which it has forgotten now; b"": nothing."""

    number: int
    known: bytes


# To the front


class ModelKnown(_Message, frozen=True, tag=True):
    """A model of the head, and its place among them. `offer`: what it is read from, or None if the
    configuration names it. `no_forwarding`: as `ModelBackend.why_not_forwarded`."""

    model: str
    place: int
    card: ModelCard
    offer: ModelOffer | None
    no_forwarding: str


class HeadState(_Message, frozen=True, tag=True):
    """What `ServingBackend.not_ready` and `ServingBackend.is_stopping` say of the head.
    `wants_copies`: a standby follows the answers under way."""

    not_ready: str
    is_stopping: bool
    wants_copies: bool = False


class AnswerPart(Struct, frozen=True, array_like=True):
    """More tokens of one answer; see `Output`. `position`: how many tokens of it come before these,
    with those that the client has from another head."""

    number: int
    position: int
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    timings_s: dict[str, float] | None = None


class AnswersGrown(_Message, frozen=True, tag=True):
    """What all answers of a front got in one turn of the head's loop."""

    parts: tuple[AnswerPart, ...]


class AnswerPlaced(_Message, frozen=True, tag=True):
    """What a request without a token does now; see `ModelBackend.stage`."""

    number: int
    stage: str


class ToldRefusal(Refusal, frozen=True):
    """Like `RequestRefused`."""

    is_counted: bool = False


class AnswerRefused(_Message, frozen=True, tag=True):
    number: int
    refusal: ToldRefusal


class Told(_Message, frozen=True, tag=True):
    """The answer to a question, as msgpack; or why it is refused."""

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

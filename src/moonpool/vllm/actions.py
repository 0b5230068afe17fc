"""Events of an instance whose engine is vLLM, and the actions that its driver performs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.protocol.messages import (
    AttemptId,
    AttemptSpec,
    BlocksChanged,
    BlocksSnapshot,
    Command,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import BlockKey, FinishReason, Token
from moonpool.vllm.block_names import ForeignEvent
from moonpool.vllm.known_cache import PrefixCounts


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """One increment of a request's output; the last one has a `finish`.

    `handle` is set in the only output of a prefill that hands over: it names the place of the
    prompt's KVCache.
    """

    attempt_id: AttemptId
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """A request failed and has no more outputs. `refused`: whether the request itself is at fault.
    `status`: the HTTP status with which the server refused."""

    attempt_id: AttemptId
    message: str
    refused: bool = False
    status: int = 0


@dataclass(frozen=True, slots=True)
class EngineStepEnded:
    """The outputs since `FlushStep` form one step."""


@dataclass(frozen=True, slots=True)
class CacheEventsReceived:
    """Events of the engine's cache, in order. `lost`: whether some events were lost, so that
    earlier ones are void."""

    events: tuple[ForeignEvent, ...]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PrefixesCounted:
    """The engine's own counts of its prefix cache, since its start."""

    counts: PrefixCounts


@dataclass(frozen=True, slots=True)
class CacheExplained:
    """Why the events of the engine's cache do not fit, for the operator, or "" if they fit."""

    note: str


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """The engine's slots, or its saved slots, have changed. `counters`: how often slots were saved,
    restored and so on, by name."""

    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed, so the events of the engine's cache are judged again."""


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """The KVCache pool of the engine's host is there: others read its blocks at this address."""

    address: PeerAddress


@dataclass(frozen=True, slots=True)
class PoolChanged:
    """The pool reports what it holds now."""

    report: BlocksChanged | BlocksSnapshot


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The pool is gone."""


@dataclass(frozen=True, slots=True)
class PoolReady:
    """The pool has the first `num_blocks` of the blocks that `AwaitPool` names, and gets no more of
    them."""

    attempt_id: AttemptId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AwaitPool:
    """Copy these blocks from the pool at `source` into the pool of the engine's host; without a
    source, wait until the engine has stored them there. The driver posts `PoolReady` in any
    case."""

    attempt_id: AttemptId
    keys: tuple[BlockKey, ...]
    source: PeerAddress | None = None


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Submit an attempt with its tokens to the engine; post `EngineOutput`s or `SubmitFailed`.

    `hands_over`: whether to compute only the prompt, and keep its KVCache for the holder of the
    handle. `handle`: the place of the prompt's KVCache. `has_pool`: whether the engine shares a
    pool, which names blocks by the cache salt, so that a salt is always sent.
    """

    attempt: AttemptSpec
    hands_over: bool = False
    handle: bytes = b""
    has_pool: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel a request. No output of the request may be posted from now on."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class FlushStep:
    """Post `EngineStepEnded` when all outputs of the current step should have arrived."""


@dataclass(frozen=True, slots=True)
class ExplainCache:
    """The events of the engine's cache are missing, or contradict its answers (`fits` False): find
    out why, request lost events again, and post `CacheExplained`. The events may also fit again.
    `other_block_tokens`: the block size of events that have another size, or 0 without such
    events."""

    fits: bool
    other_block_tokens: int = 0


VllmEvent = (
    Command
    | EngineOutput
    | SubmitFailed
    | EngineStepEnded
    | CacheEventsReceived
    | PrefixesCounted
    | CacheExplained
    | SlotsChanged
    | TimePassed
    | PoolJoined
    | PoolChanged
    | PoolLost
    | PoolReady
)
VllmAction = (
    SubmitRequest | CancelRequest | FlushStep | SendReport | ExitProcess | ExplainCache | AwaitPool
)

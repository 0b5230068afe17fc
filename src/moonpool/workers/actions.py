"""What an instance's state machine asks its driver to do, and what the driver tells it.

Commands and messenger events go in as they are; only the engine's word is added here. The same
vocabulary is performed by the live worker process and by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.kvcache.transfers import MessengerEvent, PeerAddress
from moonpool.types import BlockId, BlockKey, SamplingParams, Token
from moonpool.workers.messages import Command, Report, WorkId


@dataclass(frozen=True, slots=True)
class Arriving:
    """Transfers under way that fill blocks which a step reads, layer by layer: a fetch ("": none)
    and loads. Before attention of a layer the engine waits until all have brought that layer, but
    in all no longer than `timeout_s`."""

    fetch_id: str
    timeout_s: float
    load_ids: tuple[str, ...] = ()


class StepEntry(NamedTuple):
    """One work's share of a step, ready for the engine.

    `sends` are the blocks, as (index in the work's block table, block), whose slices of a layer
    are complete once this step has passed that layer: the driver streams them layer by layer
    while later layers run.

    `arriving`: blocks before `start` are still on their way. If a layer of them does not come, or
    does not hold, the entry is `missed`: from the next layer on nothing of it is streamed.
    """

    work_id: WorkId
    new_token_ids: Sequence[int]
    start: int
    block_ids: Sequence[BlockId]
    draw: SamplingParams | None
    generated: Sequence[int]
    sends: tuple[tuple[int, BlockId], ...]
    arriving: Arriving | None = None
    prompt_ids: frozenset[int] = frozenset()
    """The prompt's tokens, each once, where the draw looks at them."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the engine; answer with `StepEnded` or `StepFailed`. No more of them are under way at a
    time than the engine has stages, and they end in the order in which they began.

    A step of decodes alone may be repeated, each token feeding the next, up to `max_repeats` times
    in all or until one of its answers ends, and is then answered with `StepsEnded`: so a simulator
    need not hear of every token, and an engine may run several steps without a word between.
    """

    entries: tuple[StepEntry, ...]
    max_repeats: int = 1


@dataclass(frozen=True, slots=True)
class StopRepeating:
    """Something else should run next: end the repeated step with the repetition under way."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """`tokens[i]` belongs to `entries[i]` of the step. `missed` are the indices of the entries
    whose prefix did not arrive: what was computed of them from there on is void. Of all others,
    whatever was arriving has ended, and its end has been told, before this."""

    tokens: Sequence[Token | None]
    seconds: float
    missed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepsEnded:
    """The step was run several times: `tokens[i]` are those of `entries[i]`, one a repetition."""

    tokens: Sequence[Sequence[Token]]
    seconds: float  # of all


@dataclass(frozen=True, slots=True)
class StepFailed:
    """`lost_arena`: it failed because that arena is gone; works without blocks there can go on."""

    message: str
    lost_arena: int | None = None


@dataclass(frozen=True, slots=True)
class ArenaLost:
    """One of the arenas in which the instance's blocks lie is gone, and all that was in it. What
    was begun with its blocks ends all the same, each by its own event."""

    arena: int
    message: str


@dataclass(frozen=True, slots=True)
class ArenaBack:
    """The arena can be used again; of its blocks, these have kept their content."""

    arena: int
    named: tuple[tuple[BlockId, BlockKey], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    fetch_id: str
    source: PeerAddress
    keys: Sequence[BlockKey]
    block_ids: Sequence[BlockId]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GrantRead:
    read_id: str
    block_ids: Sequence[BlockId]


@dataclass(frozen=True, slots=True)
class OpenStream:
    stream_id: str
    target: PeerAddress
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """All layers of blocks that were complete before the prefill began (a cached prefix)."""

    stream_id: str
    blocks: tuple[tuple[int, BlockId], ...]


@dataclass(frozen=True, slots=True)
class FinishStream:
    stream_id: str


@dataclass(frozen=True, slots=True)
class AbortStream:
    stream_id: str


@dataclass(frozen=True, slots=True)
class ExpectStream:
    stream_id: str
    block_ids: Sequence[BlockId]
    first_index: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelStream:
    stream_id: str


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Write blocks to slots of the SSD, in this order; answer with `StoreEnded`. Until then the
    blocks are held and only read; what was in the slots is void already."""

    store_id: str
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Read slots of the SSD into blocks, in this order; answer with `LoadEnded`. Until then the
    blocks are the reader's alone, and the slots keep what they hold. `by_layer`: a prefill may
    compute meanwhile, so one layer of all blocks comes after the other, and `LoadProgress` says how
    far it is."""

    load_id: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    by_layer: bool = False


@dataclass(frozen=True, slots=True)
class LookUpBlocks:
    """Ask a store that others use too how long a run of `keys` it holds; answer with
    `LookUpEnded`, soon: a prefill waits for it."""

    lookup_id: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class ForgetStored:
    """These slots' contents are void (evicted, corrupt, or never completely written): they must
    not be found again. Needs no answer."""

    slots: tuple[int, ...]


class Tell(NamedTuple):
    """Send a report to the head."""

    report: Report


@dataclass(frozen=True, slots=True)
class Depart:
    """The head wants nothing more: end the process in good order."""


WorkerEvent = Command | MessengerEvent | StepEnded | StepsEnded | StepFailed | ArenaLost | ArenaBack

WorkerAction = (
    RunStep
    | StopRepeating
    | FetchBlocks
    | GrantRead
    | OpenStream
    | SendBlocks
    | FinishStream
    | AbortStream
    | ExpectStream
    | CancelStream
    | StoreBlocks
    | LoadBlocks
    | LookUpBlocks
    | ForgetStored
    | Depart
    | Tell
)

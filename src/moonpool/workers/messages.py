"""What head and worker say to each other. Commands go down to an instance, reports come up from it.

A *work* is one attempt at a request on an instance; a request that is tried again becomes a new
work, so that the remains of the first attempt can never be taken for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from moonpool.cost.fitted import FittedCost
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import (
    BlockKey,
    FinishReason,
    InstanceId,
    Role,
    SamplingParams,
    Slo,
    Struct,
    Token,
)

WorkId = NewType("WorkId", str)


class Work(Struct, frozen=True):
    """The tokens to compute and how to go on. The first `num_prompt_tokens` of `token_ids` are the
    prompt; any after it were generated before a fault, and are not generated again. `keys`: as in
    `Request`; blocks past the last of them stay nameless."""

    work_id: WorkId
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    slo: Slo
    tenant: str
    use_cache: bool
    timeout_s: float
    keys: tuple[BlockKey, ...] | None = None
    tolerance: float = 1.0  # of the decode instance's own check: so many times what was promised


class Fetch(Struct, frozen=True):
    """Where a longer prefix lies than the instance itself holds."""

    source: PeerAddress
    num_blocks: int  # the prefix the source is believed to hold
    load_s: float = 0.0  # that the source should take to read some of it from its SSD first


# Commands


class StartPrefill(Struct, frozen=True, tag=True):
    """Prefill, then stream the KVCache to `target` as layers get ready; without a target, decode
    here."""

    work: Work
    fetch: Fetch | None = None
    target: PeerAddress | None = None


class ReserveDecode(Struct, frozen=True, tag=True):
    """Hold blocks for the work's prompt and receive its KVCache."""

    work: Work
    patient: bool = False  # it waits for an arena that is lost: nobody else can take it


class StartDecode(Struct, frozen=True, tag=True):
    """The prefill is done and has drawn this token: decode on as soon as the KVCache is here.
    `handle`: where it is, if the engine is to fetch it itself."""

    work_id: WorkId
    token: Token
    handle: bytes = b""


class Abort(Struct, frozen=True, tag=True):
    """Give up a work, whatever its state, and free what it holds. Unknown works are ignored."""

    work_id: WorkId


class StopReceiving(Struct, frozen=True, tag=True):
    """The sender of the work's KVCache is gone or cannot reach this instance: what has not arrived
    never will. Without this word, a stream that never began would be waited for until the deadline.
    """

    work_id: WorkId


class Resync(Struct, frozen=True, tag=True):
    """The Conductor missed events: announce all blocks."""


class SwitchRole(Struct, frozen=True, tag=True):
    """Be an instance of this role from now on. What is cached stays, and so does any work."""

    role: Role


class MarkCopies(Struct, frozen=True, tag=True):
    """Of blocks in this instance's DRAM: those that another keeps in its own from now on, and
    those that nobody else does."""

    spare: tuple[BlockKey, ...] = ()
    last: tuple[BlockKey, ...] = ()


class ListHot(Struct, frozen=True, tag=True):
    """Say which prefixes are used most here, of so many blocks at most, in a `HotPrefixes` of this
    number. `lost_with_it`: only up to the last block that no store keeps that others load from,
    too."""

    number: int
    num_blocks: int
    lost_with_it: bool = False


class TakeOver(Struct, frozen=True, tag=True):
    """Have this prefix too, from somebody who leaves: fetch what is missing of it into free blocks,
    or in place of those used less often. Answered by `TakenOver`."""

    number: int
    source: PeerAddress
    keys: tuple[BlockKey, ...]
    num_uses: int
    timeout_s: float


class Leave(Struct, frozen=True, tag=True):
    """Nothing more is wanted of this instance: end the process."""


Command = (
    StartPrefill
    | ReserveDecode
    | StartDecode
    | StopReceiving
    | Abort
    | Resync
    | SwitchRole
    | MarkCopies
    | ListHot
    | TakeOver
    | Leave
)

# Reports


class InstanceInfo(Struct, frozen=True):
    """What an instance says of itself when it joins."""

    instance_id: InstanceId
    role: Role
    incarnation: int
    address: PeerAddress
    layout: BlockLayout
    num_blocks: int
    cost: FittedCost
    pid: int
    host: str
    engine_tokens: int = 0  # of KVCache that the engine's own memory holds; 0: all of the pool
    chunk_tokens: int = 0  # the most that one step takes of prompts; 0: unknown
    num_stages: int = 1  # a step of decodes has an even share of all that decode
    num_ranks: int = 1  # that share out every layer
    largest_blocks: int = 0  # that one request can have, where that is not all; 0: all


class PrefillStarted(Struct, frozen=True, tag=True):
    """The first chunk is being computed; `cached_tokens` are not, `fetched_tokens` of them by
    a fetch that took `fetch_s`, `loaded_tokens` because they were on this instance's SSD. `early`:
    it began before all of these were here, and this was told when they were."""

    work_id: WorkId
    cached_tokens: int
    fetched_tokens: int
    loaded_tokens: int = 0
    corrupt_slices: int = 0
    fetch_s: float = 0.0
    early: bool = False


class PrefillDone(Struct, frozen=True, tag=True):
    """The prompt is computed and its first token drawn; `finish` is set if that token ends it.
    `handle` is passed on to who decodes."""

    work_id: WorkId
    token: Token
    finish: FinishReason | None = None
    handle: bytes = b""


class DecodeAccepted(Struct, frozen=True, tag=True):
    """The local check of the SLO passed and the KVCache is here: the work decodes now (Mooncake
    step 4). Only then is its first token seen, so that waiting for the KVCache counts as time to
    the first token and not as time between tokens."""

    work_id: WorkId


class TransferDone(Struct, frozen=True, tag=True):
    """The KVCache is here; `corrupt_blocks` of it have to be computed again."""

    work_id: WorkId
    num_bytes: int
    seconds: float
    corrupt_blocks: int
    error: str = ""


class StreamBroken(Struct, frozen=True, tag=True):
    """The sender's word that its layer stream failed; the receiver may never have heard of it."""

    work_id: WorkId
    error: str


class WorkFailed(Struct, frozen=True, tag=True):
    """This instance gives the work up and has freed, or is freeing, what it held."""

    work_id: WorkId
    reason: str  # no_blocks | tbt_slo | engine_error | blocks_lost | refused_by_engine
    message: str


class WorkTokens(Struct, frozen=True, array_like=True):
    work_id: WorkId
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None


class StepTokens(Struct, frozen=True, tag=True):
    """All tokens of one step, or of several that came `gap_s` apart, the last one now. 0: the step
    was not of decodes alone."""

    works: tuple[WorkTokens, ...]
    gap_s: float = 0.0


class BlocksChanged(Struct, frozen=True, tag=True):
    """Names that are in DRAM from now on (`stored`), on the SSD only (`demoted`), or nowhere."""

    sequence: int
    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    demoted: tuple[BlockKey, ...] = ()


class BlocksSnapshot(Struct, frozen=True, tag=True):
    """All blocks held now, those in DRAM and those on the SSD only; `next_sequence` numbers the
    next `BlocksChanged`."""

    next_sequence: int
    keys: tuple[BlockKey, ...]
    demoted: tuple[BlockKey, ...] = ()


class RoleChanged(Struct, frozen=True, tag=True):
    """The answer to `SwitchRole`: what the instance is now, and says it is when it joins anew."""

    role: Role


class HotPrefix(Struct, frozen=True, array_like=True):
    """Blocks of one prompt's beginning, all in DRAM; the last one was used so often since it got
    its name."""

    keys: tuple[BlockKey, ...]
    num_uses: int


class HotPrefixes(Struct, frozen=True, tag=True):
    """The most used first."""

    number: int
    prefixes: tuple[HotPrefix, ...]


class TakenOver(Struct, frozen=True, tag=True):
    """So many blocks arrived; `full`: there was no room for all."""

    number: int
    num_blocks: int
    full: bool = False
    error: str = ""


class WantsToLeave(Struct, frozen=True, tag=True):
    """This process was told to end, and would like to do so in order, within so many seconds."""

    within_s: float


class TierLoad(Struct, frozen=True):
    """Blocks of the tier below DRAM as they are now: held + available is all of them; of a store
    that others use too, those that this instance knows of. `error`: why the tier is gone, or never
    was."""

    blocks: int
    held: int
    available: int
    cached: int
    owners: dict[str, int]
    error: str = ""
    name: str = "SSD"  # what kind of tier it is


class InstanceLoad(Struct, frozen=True, tag=True):
    """Heartbeat and gauges of an instance; `owners` are the holds behind `held_blocks`."""

    num_running: int
    num_waiting: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    owners: dict[str, int]
    counters: dict[str, float]
    num_blocks: int = 0  # of the pool: held and free ones
    ssd: TierLoad | None = None


Report = (
    PrefillStarted
    | PrefillDone
    | DecodeAccepted
    | TransferDone
    | StreamBroken
    | WorkFailed
    | StepTokens
    | BlocksChanged
    | BlocksSnapshot
    | RoleChanged
    | HotPrefixes
    | TakenOver
    | WantsToLeave
    | InstanceLoad
)

"""The messages between head and worker: commands to an instance and reports from it.

An instance works on attempts, not on requests. A retry of a request is a new attempt with an id of
its own, so that late messages of the first attempt are never taken for messages of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.model_offer import OfferedAdapter
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import (
    BlockKey,
    FinishReason,
    InstanceId,
    RequestId,
    Role,
    SamplingParams,
    Slo,
    Struct,
    Token,
)

AttemptId = NewType("AttemptId", str)


def request_of(attempt_id: AttemptId) -> RequestId:
    """Returns the request of an attempt: the attempt's id is the request's id and a number after a
    slash."""
    return RequestId(attempt_id.rpartition("/")[0])


class ForwardedCall(Struct, frozen=True):
    """A call that a vLLM server gets as its client has sent it: the endpoint's path, and the JSON
    body. `is_exact`: whether its tokens are exactly those of the server, and not estimates.
    `tells_first_token`: whether the first part of its response shows that its prefill has ended."""

    path: str
    body: bytes
    is_exact: bool = False
    tells_first_token: bool = False


class TokenRoute(Struct, frozen=True):
    """The front whose client waits for an attempt's tokens. `front`: the name of the front. `port`:
    the port on which it listens, at the head's address. `number`: the front's number of the answer.
    `attempt`: the number of the answer's attempt, from 1 on."""

    front: str
    port: int
    number: int
    attempt: int


class AttemptSpec(Struct, frozen=True):
    """One attempt at a request: the tokens to compute and how to continue them.

    The first `num_prompt_tokens` of `token_ids` are the prompt. The tokens after it were generated
    before a fault and are not generated again. `keys`: the block keys, as in `Request`; blocks
    after the last key are not cached. `tolerance`: the multiple of the SLO that the decode
    instance's own check allows. `max_step_s`: instead of that check, the request waits to join the
    batch until a step of all decodes should take no longer than this; with None the request does
    not wait. `traceparent` is passed to an engine that does its own tracing. `is_traced`: whether
    the instance reports an `AttemptSpan` of each part. `call`: the body to compute, for a forwarded
    request; the head adds it when it sends the attempt. `route`: where the tokens go directly, or
    None if they go to the head. The head adds it, too.
    """

    attempt_id: AttemptId
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    slo: Slo
    tenant: str
    use_cache: bool
    timeout_s: float
    keys: tuple[BlockKey, ...] | None = None
    tolerance: float = 1.0
    max_step_s: float | None = None
    traceparent: str = ""
    is_traced: bool = False
    adapter: str = ""  # fingerprint of the adapter, as in `Request`
    priority: int = 0  # priority of the request, as in `Request`
    share: float = 1.0  # share of the tenant, relative to other tenants
    cache_share: float = 1.0  # share of the instance's cache that the tenant may have
    call: ForwardedCall | None = None  # only since protocol 11
    route: TokenRoute | None = None  # only since protocol 11


class PrefixSource(Struct, frozen=True):
    """A peer that holds a longer prefix than the instance itself."""

    source: PeerAddress
    num_blocks: int  # length of the prefix that the source should hold
    # expected time that the source needs to read part of the prefix from its SSD
    load_s: float = 0.0


# Commands


class StartPrefill(Struct, frozen=True, tag=True):
    """Run the prefill and stream the KVCache to `target` layer by layer; without a target, decode
    on this instance."""

    attempt: AttemptSpec = msgspec.field(name="work")
    fetch: PrefixSource | None = None
    target: PeerAddress | None = None


class ReserveDecode(Struct, frozen=True, tag=True):
    """Hold blocks for the prompt and receive its KVCache."""

    attempt: AttemptSpec = msgspec.field(name="work")
    # whether it may wait for a lost arena, because no other instance can take it
    patient: bool = False


class StartDecode(Struct, frozen=True, tag=True):
    """The prefill is done and has drawn this token: decode once the KVCache has arrived. `handle`:
    the place of the KVCache, if the engine fetches it itself."""

    attempt_id: AttemptId
    token: Token
    handle: bytes = b""


class Abort(Struct, frozen=True, tag=True):
    """End an attempt in any state and free its blocks. Unknown attempts are ignored."""

    attempt_id: AttemptId


class StopReceiving(Struct, frozen=True, tag=True):
    """The sender of the KVCache is gone or cannot reach this instance, so no more KVCache will
    arrive, and the decode computes what is missing. Without this command, a decode would wait until
    its deadline for a stream that never began or that broke."""

    attempt_id: AttemptId


class Resync(Struct, frozen=True, tag=True):
    """The Conductor missed events: report all blocks in a `BlocksSnapshot`."""


class SwitchRole(Struct, frozen=True, tag=True):
    """Change the instance's role; answered with `RoleChanged`. Cached blocks and attempts stay."""

    role: Role


class MarkReplicas(Struct, frozen=True, tag=True):
    """Blocks in this instance's DRAM that are evicted first from now on (`spare`): another instance
    holds them too, or the program that uses them pauses for long. `last`: blocks for which this is
    over."""

    spare: tuple[BlockKey, ...] = ()
    last: tuple[BlockKey, ...] = ()


class PrefetchBlocks(Struct, frozen=True, tag=True):
    """Load the blocks of this prefix that are on the SSD only, when nothing more urgent is to be
    done. Not answered."""

    keys: tuple[BlockKey, ...]


class ListHot(Struct, frozen=True, tag=True):
    """List the most used prefixes, up to `num_blocks` blocks in total; answered with `HotPrefixes`
    of this number. `lost_with_it`: whether to list only prefixes that end with a block which no
    shared store holds."""

    number: int
    num_blocks: int
    lost_with_it: bool = False


class TakeOverPrefix(Struct, frozen=True, tag=True):
    """Copy a prefix from an instance that leaves, or one that many sessions begin with: fetch the
    missing blocks into free blocks, or in place of blocks that are used less often. The instance
    answers with `PrefixTakenOver`."""

    number: int
    source: PeerAddress
    keys: tuple[BlockKey, ...]
    num_uses: int
    timeout_s: float


class LeaveCluster(Struct, frozen=True, tag=True):
    """End the process."""


class DropCachedBlocks(Struct, frozen=True, tag=True):
    """Forget all cached blocks that no request holds, in DRAM and on the SSD."""


Command = (
    StartPrefill
    | ReserveDecode
    | StartDecode
    | StopReceiving
    | Abort
    | Resync
    | SwitchRole
    | MarkReplicas
    | PrefetchBlocks
    | ListHot
    | DropCachedBlocks
    | TakeOverPrefix
    | LeaveCluster
)

# Reports


class InstanceInfo(Struct, frozen=True):
    """The description of an instance, sent when it joins."""

    instance_id: InstanceId
    role: Role
    incarnation: int
    address: PeerAddress
    layout: BlockLayout
    num_blocks: int
    cost: FittedCost
    pid: int
    host: str
    # KVCache tokens that the engine's own memory holds; 0 means the whole pool
    engine_tokens: int = 0
    chunk_tokens: int = 0  # most prompt tokens per step; 0 means unknown
    num_stages: int = 1  # pipeline stages; a step has an even share of the decodes
    num_ranks: int = 1  # tensor-parallel ranks
    largest_blocks: int = 0  # most blocks of one request; 0 if one request may have all
    adapters: tuple[str, ...] = ()  # fingerprints of the adapters that the instance has loaded
    # most tokens of a prompt and its answer; 0 means as many as its blocks hold
    context_tokens: int = 0
    caches_prefixes: bool = True  # whether later requests can use what a prompt has computed


class PrefillStarted(Struct, frozen=True, tag=True):
    """The prefill has begun after `cached_tokens`, which need no computing.

    Of the cached tokens, `fetched_tokens` came from a peer within `fetch_s`, and `loaded_tokens`
    from this instance's SSD. `early`: whether the prefill began before all of these tokens had
    arrived; this report was then sent when they had.
    """

    attempt_id: AttemptId
    cached_tokens: int
    fetched_tokens: int
    loaded_tokens: int = 0
    corrupt_slices: int = 0
    fetch_s: float = 0.0
    early: bool = False


class PrefillDone(Struct, frozen=True, tag=True):
    """The prompt is computed and the first token drawn; `finish` is set if that token is the last.
    `handle` is passed to the decode instance."""

    attempt_id: AttemptId
    token: Token
    finish: FinishReason | None = None
    handle: bytes = b""


class DecodeAccepted(Struct, frozen=True, tag=True):
    """The local check of the SLO passed and the KVCache has arrived: the attempt decodes (Mooncake
    step 4). The client gets the first token only now, so that waiting for the KVCache counts as
    TTFT and not as TBT."""

    attempt_id: AttemptId


class TransferDone(Struct, frozen=True, tag=True):
    """The transfer of the KVCache has ended. `corrupt_slices` of the KVCache had a wrong checksum;
    missing KVCache is computed again."""

    attempt_id: AttemptId
    num_bytes: int
    seconds: float
    # The name in frames is older: workers of the previous release counted blocks, and missing ones.
    corrupt_slices: int = msgspec.field(name="corrupt_blocks")
    error: str = ""


class AttemptSpan(Struct, frozen=True, tag=True):
    """A part of a traced attempt that has ended now, after `seconds`."""

    attempt_id: AttemptId
    name: str  # one of fetch, ssd_load, prefill_chunk
    seconds: float
    num_tokens: int = 0
    num_bytes: int = 0


class StreamBroken(Struct, frozen=True, tag=True):
    """The sender's layer stream failed; the receiver may not know of the stream at all."""

    attempt_id: AttemptId
    error: str


class AttemptFailed(Struct, frozen=True, tag=True):
    """The instance has ended the attempt and has freed its blocks, or frees them when the last
    transfer ends."""

    attempt_id: AttemptId
    reason: str  # one of no_blocks, tbt_slo, engine_error, blocks_lost, refused_by_engine
    message: str
    engine_status: int = 0  # HTTP status with which a vLLM server refused; since protocol 11


class AttemptTokens(Struct, frozen=True, array_like=True):
    """New tokens of one attempt; `finish` is set with its last token. `num_direct`: how many of the
    tokens, from the first on, went to a front directly. `longest_gap_s`: the longest time between
    two of the tokens, if these are of several steps; 0 means one step, or gaps as in
    `StepTokens.gap_s`."""

    attempt_id: AttemptId
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    num_direct: int = 0  # only since protocol 11
    longest_gap_s: float = 0.0  # likewise


class StepTokens(Struct, frozen=True, tag=True):
    """All tokens of one step, or of repeated steps `gap_s` apart, of which the last one has just
    ended. `gap_s` is 0 if the step did not consist of decodes alone."""

    attempts: tuple[AttemptTokens, ...] = msgspec.field(name="works")
    gap_s: float = 0.0


class BlocksChanged(Struct, frozen=True, tag=True):
    """Keys of blocks that are now in DRAM (`stored`), on the SSD only (`demoted`), or in neither
    (`removed`)."""

    sequence: int
    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    demoted: tuple[BlockKey, ...] = ()


class BlocksSnapshot(Struct, frozen=True, tag=True):
    """Keys of all cached blocks: `keys` in DRAM, `demoted` on the SSD only. `next_sequence` is the
    number of the next `BlocksChanged`."""

    next_sequence: int
    keys: tuple[BlockKey, ...]
    demoted: tuple[BlockKey, ...] = ()


class RoleChanged(Struct, frozen=True, tag=True):
    """The answer to `SwitchRole`: the instance's role, which it also reports when it rejoins."""

    role: Role


class HotPrefix(Struct, frozen=True, array_like=True):
    """The first blocks of a prompt, all in DRAM; `num_uses` counts the uses of the last one since
    it was cached."""

    keys: tuple[BlockKey, ...]
    num_uses: int


class HotPrefixes(Struct, frozen=True, tag=True):
    """The answer to `ListHot`, the most used prefix first."""

    number: int
    prefixes: tuple[HotPrefix, ...]


class PrefixTakenOver(Struct, frozen=True, tag=True):
    """The answer to `TakeOverPrefix`: the number of blocks that arrived. `full`: whether there was
    no room for all blocks."""

    number: int
    num_blocks: int
    full: bool = False
    error: str = ""


class LeaveRequested(Struct, frozen=True, tag=True):
    """The process has received a signal to end, and asks to be drained within `within_s`."""

    within_s: float


class TierLoad(Struct, frozen=True):
    """Gauges of the tier below DRAM: held + available = all blocks. For a shared store, the numbers
    count the blocks that this instance knows of. `error`: why the tier is lost or could not be
    opened."""

    blocks: int
    held: int
    available: int
    cached: int
    owners: dict[str, int]
    error: str = ""
    name: str = "SSD"  # the kind of the tier


class CacheView(Struct, frozen=True):
    """How the head knows what a vLLM server caches, and how right this knowledge is.

    `source`: "events" that the server publishes; "assumed" from the prompts that it has received,
    because no events were asked for; "distrusted": assumed likewise, because events are missing or
    contradict the answers; "slots" of a llama-server, in which moonpool puts each prompt. Token
    counts start when the instance joined: tokens of prompts that the server was sent, of which
    `expected_tokens` should have been cached; and counts of the server itself, which may have other
    clients, too.
    """

    source: str
    note: str = ""  # why the events are not used, and what to do about it
    prompt_tokens: int = 0
    expected_tokens: int = 0
    engine_queries: int = 0
    engine_hits: int = 0


class InstanceLoad(Struct, frozen=True, tag=True):
    """Heartbeat and gauges of an instance; `owners` splits `held_blocks` by owner of the holds."""

    num_running: int
    num_waiting: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    owners: dict[str, int]
    counters: dict[str, float]
    num_blocks: int = 0  # number of blocks of the whole pool
    ssd: TierLoad | None = None
    cache_view: CacheView | None = None  # view of a vLLM server's cache; since protocol 11


class CostMeasured(Struct, frozen=True, tag=True):
    """The times of an instance that joined with assumed ones. `address`: the address where others
    now read its blocks, if it has changed. This message exists since protocol 11."""

    cost: FittedCost
    address: PeerAddress | None = None


class AdaptersLoaded(Struct, frozen=True, tag=True):
    """All LoRA adapters that a vLLM server has now: some were loaded or unloaded while it served.
    This message exists since protocol 11."""

    adapters: tuple[OfferedAdapter, ...]


Report = (
    PrefillStarted
    | PrefillDone
    | DecodeAccepted
    | TransferDone
    | AttemptSpan
    | StreamBroken
    | AttemptFailed
    | StepTokens
    | BlocksChanged
    | BlocksSnapshot
    | RoleChanged
    | HotPrefixes
    | PrefixTakenOver
    | LeaveRequested
    | InstanceLoad
    | CostMeasured
    | AdaptersLoaded
)

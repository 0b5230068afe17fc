"""The scheduler's side of the connector: which blocks to load and to store.

A prompt is looked up in the pool when it arrives. The pool's answer comes while vLLM does other
work; until then the request waits, and others continue. Blocks that only the pool has are loaded in
a step before the request's first one. vLLM could also load within that step, but would then let
other requests use the blocks before it knows that they arrived as they were stored. Blocks that
only vLLM has are stored in the step after they were computed, because then the tokens are final and
the blocks do not change. vLLM frees blocks that have left a window, so this module holds them until
they are stored (`held_blocks`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.host_pool.messages import (
    PROTOCOL,
    Find,
    Found,
    JoinPool,
    PoolMessage,
    Release,
    Waiting,
)
from moonpool_engine.vllm.adapters import Adapters
from moonpool_engine.vllm.held_blocks import HeldBlocks
from moonpool_engine.vllm.pool_link import PoolLink
from moonpool_engine.vllm.prompt_keys import PromptKeys
from moonpool_engine.vllm.step_waits import StepWaits
from moonpool_engine.vllm.transfers import (
    BlockTable,
    LoadSpec,
    RankReady,
    StepTransfers,
    StoreSpec,
    TransfersEnded,
)

log = logging.getLogger("moonpool.vllm_connector")

TableOf = Callable[[str], BlockTable]
"""The blocks of a request."""

AHEAD = 16
"""The most finds of requests that are not next yet, because each find holds blocks in the pool."""
ANSWER_S = 0.002
"""How long the scheduler waits for one answer; in one step it waits at most `ANSWERS_S`."""
ANSWERS_S = 0.004
SILENCE_S = 0.25
"""A pool that is silent for this long gets no requests for `PAUSE_S`."""
PAUSE_S = 2.0
LOAD_S = 20.0
"""The most time for which a request waits for the SSD, or for another vLLM."""
LOAD_SILENCE_S = 1.0
"""The longest silence of the pool during such a wait: a pool that works reports ten times per
second."""


@dataclass(slots=True)
class _Search:
    """A search of one request in the pool."""

    owner: str
    asked_s: float
    until_s: float
    found: Found | None = None


@dataclass(slots=True)
class _RequestState:
    request: Any
    keys: PromptKeys
    search: _Search | None = None
    next_store: int = 0  # number of the first block that may be missing in the pool
    has_stores: bool = False
    has_failed: bool = False  # whether a load has failed, so that the request is computed
    from_ssd: int = 0  # number of the last loaded blocks that came from the SSD


class SchedulerSide:
    """Lives in vLLM's scheduler. All methods but `_on_message` and `_on_end` are for vLLM's
    scheduler thread."""

    def __init__(
        self, pool_path: Path, block_tokens: int, now: Callable[[], float], adapters: Adapters
    ) -> None:
        self._block_tokens = block_tokens
        self._now = now
        self._group = b""
        self._num_ranks = 1
        self._windows: tuple[int, ...] = (0,)
        self._held: HeldBlocks | None = None
        self._requests: dict[str, _RequestState] = {}
        self._adapters = adapters
        self._loads: list[LoadSpec] = []
        self._stores: list[StoreSpec] = []
        self._num_stores = 0
        self._finished: list[str] = []
        self._loading: dict[str, str] = {}  # owner of a load in progress -> request
        self._ends: dict[str, int] = {}  # number of ranks that have ended each transfer
        self._num_searches = 0
        self._paused_until_s = 0.0
        self.waits = StepWaits(ANSWERS_S, now)
        self.counts = {
            "looked_up": 0,
            "hits": 0,
            "loaded": 0,
            "from_ssd": 0,
            "failed_loads": 0,
            "silent": 0,
        }
        self._link = PoolLink(
            pool_path, JoinPool(protocol=PROTOCOL), self._on_message, self._on_end
        )
        self._lock = threading.Lock()  # guards the fields below
        self._has_news = threading.Condition(self._lock)
        self._searches: dict[str, _Search] = {}

    def begin(self, ready: list[RankReady], block_pool: Any = None) -> None:
        """Begins to use the pool, if all workers can. `block_pool`: vLLM's block pool, given if
        some layers have a window."""
        refusals = [one.refusal for one in ready if one.refusal]
        groups = {(one.group, one.windows) for one in ready}
        if refusals or len(groups) != 1 or len(ready) != ready[0].num_ranks:
            text = refusals[0] if refusals else "its workers do not fit together"
            log.error("vLLM serves without the KVCache pool: %s", text)
            return
        (self._group, self._windows), self._num_ranks = groups.pop(), len(ready)
        if any(self._windows):
            self._held = HeldBlocks(block_pool, self._windows)
        self._link.start()

    def leave_pool(self, reason: str) -> None:
        """Stops using the pool: nothing is found or stored until vLLM starts again. Called after
        the weights were updated, because the pool's blocks belong to the weights at the start."""
        if not self._group:
            return
        for state in self._requests.values():
            if state.search is not None:
                self._release(state.search)
                state.search = None
        self._group = b""
        self._link.close()
        log.warning("vLLM serves without the KVCache pool until it starts again: %s", reason)

    @property
    def is_connected(self) -> bool:
        """Whether the pool is there now."""
        return self._link.connected

    def close(self) -> None:
        self._link.close()

    # Finds

    def on_new_request(self, request: Any) -> None:
        """Asks the pool for the request's prefix, if few others have been asked for already."""
        if not self._group:
            return
        with self._lock:
            num_ahead = len(self._searches)
        if num_ahead < AHEAD:
            self._search(self._state(request))

    def matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """Returns how many tokens after `num_computed` can be loaded, or None to be asked again
        later."""
        if not self._group:
            return 0
        state = self._state(request)
        if state.search is None and not state.has_failed:
            self._search(state)
        search = state.search
        if search is None:
            return 0
        found = self._answer(search)
        if found is None:
            if self._now() < search.until_s and self._link.connected:
                return None
            self._give_up(state, search)
            return 0
        size = self._block_tokens
        usable = min(found.num_blocks, (int(request.num_tokens) - 1) // size)
        if self._held is not None and usable < found.num_blocks:
            return 0  # a shorter prefix would need other blocks of its window
        return max(usable * size - num_computed // size * size, 0)

    def _answer(self, search: _Search) -> Found | None:
        """Returns the pool's answer, after waiting for a moment if necessary."""
        with self._has_news:
            if self._link.connected:
                self.waits.wait(self._has_news, lambda: search.found is not None, ANSWER_S)
            return search.found

    def _search(self, state: _RequestState) -> None:
        """Sends a find, unless there is nothing to find or nobody to ask."""
        now = self._now()
        request = state.request
        num_blocks = (request.num_tokens - 1) // self._block_tokens
        if num_blocks < 1 or now < self._paused_until_s or not self._link.connected:
            return
        keys = state.keys.extend(num_blocks)
        if not keys:
            return
        self._num_searches += 1
        search = _Search(f"{request.request_id}#{self._num_searches}", now, now + SILENCE_S)
        with self._lock:
            self._searches[search.owner] = search
        if self._link.send(Find(owner=search.owner, group=self._group, keys=tuple(keys))):
            state.search = search
            self.counts["looked_up"] += 1
        else:
            with self._lock:
                self._searches.pop(search.owner, None)

    def _give_up(self, state: _RequestState, search: _Search) -> None:
        """Gives up on a pool that does not answer: the request computes its prompt."""
        self._release(search)
        state.search = None
        self.counts["silent"] += 1
        self._paused_until_s = self._now() + PAUSE_S
        log.warning("the KVCache pool does not answer; no requests go to it for %.0f s", PAUSE_S)

    def _release(self, search: _Search) -> None:
        with self._lock:
            self._searches.pop(search.owner, None)
        self._link.send(Release(owner=search.owner, group=self._group))

    def _on_message(self, message: PoolMessage) -> None:
        with self._has_news:
            if isinstance(message, Found | Waiting):
                search = self._searches.get(message.owner)
                if search is None:
                    return
                if isinstance(message, Found):
                    search.found = message
                    self._has_news.notify_all()
                else:
                    until_s = self._now() + LOAD_SILENCE_S
                    search.until_s = min(search.asked_s + LOAD_S, until_s)

    def _on_end(self) -> None:
        """Notes that the pool has gone: nothing more is answered. Memory that was named stays
        readable."""
        with self._has_news:
            for search in self._searches.values():
                if search.found is None:
                    search.found = Found(owner=search.owner, num_blocks=0)
            self._has_news.notify_all()

    # Steps

    def on_allocated(self, request: Any, table: BlockTable, num_external: int) -> None:
        """Called when vLLM has allocated blocks (`table`) for the request and wants `num_external`
        tokens from the pool."""
        state = self._requests.get(request.request_id)
        if state is None or state.search is None:
            return
        search, state.search = state.search, None
        found = search.found
        if found is None:
            self._release(search)
            return
        size = self._block_tokens
        state.next_store = max(state.next_store, found.num_blocks)
        if not num_external:
            self._release(search)
            return
        usable = min(found.num_blocks, (request.num_tokens - 1) // size)
        first = usable - num_external // size
        load = LoadSpec(
            search.owner,
            request.request_id,
            first,
            tuple(state.keys.extend(usable, first)),
            tuple(tuple(ids[first:usable]) for ids in table),
            found.num_blocks,
            found.ranks,
        )
        self._loads.append(load)
        self._loading[load.owner] = request.request_id
        self.counts["hits"] += 1
        self.counts["loaded"] += usable - first
        state.from_ssd = min(found.num_loaded, usable - first)
        self.counts["from_ssd"] += state.from_ssd

    def ssd_tokens(self, request: Any) -> int:
        """The number of tokens that are loaded for a request and were on the SSD."""
        state = self._requests.get(request.request_id)
        return 0 if state is None else state.from_ssd * self._block_tokens

    def build(self, output: Any, table_of: TableOf) -> StepTransfers:
        """Returns the transfers of a step that vLLM has just planned."""
        self.waits.begin_step()
        preempted = tuple(getattr(output, "preempted_req_ids", None) or ())
        if self._held is not None:
            for req_id in preempted:
                self._held.give_back(req_id)
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id)
            if state is not None:
                self._note_full(state, table_of)
                self._hold(state, num_tokens, table_of)
        transfers = StepTransfers(
            loads=self._loads,
            stores=self._stores,
            preempted=preempted,
            finished=self._finished,
            has_work=bool(output.total_num_scheduled_tokens),
        )
        self._loads, self._stores, self._finished = [], [], []
        return transfers

    def _hold(self, state: _RequestState, num_tokens: int, table_of: TableOf) -> None:
        """Holds the blocks of windows that a step of `num_tokens` fills: vLLM may give them back
        with its next step, before they are stored."""
        if self._held is None or not self._link.connected:
            return
        num_full = (state.request.num_computed_tokens + num_tokens) // self._block_tokens
        if num_full > self._held.next_block(state.request.request_id, state.next_store):
            table = table_of(state.request.request_id)
            self._held.hold(state.request.request_id, state.next_store, num_full, table)

    def _note_full(self, state: _RequestState, table_of: TableOf) -> None:
        """Stores the blocks that earlier steps have filled. The newest token is not computed yet,
        and what was drafted after it may be wrong."""
        request = state.request
        num_final = min(request.num_computed_tokens, request.num_tokens - 1)
        num_full = num_final // self._block_tokens
        if num_full <= state.next_store or not self._group or not self._link.connected:
            return
        if not state.keys.is_known:  # also if the files of its adapter have changed meanwhile
            return
        first = state.next_store
        keys = state.keys.extend(num_full, first)
        if not keys:
            return
        found = table_of(request.request_id)
        end = first + len(keys)
        self._num_stores += 1
        if self._held is not None:
            held = self._held.take(request.request_id, first, end, self._num_stores)
            found = tuple(
                tuple(held.get((group, index), 0) for index in range(first, end))
                if window
                else found[group][first:end]
                for group, window in enumerate(self._windows)
            )
        else:
            found = tuple(ids[first:end] for ids in found)
        whole = [ids for ids, window in zip(found, self._windows, strict=True) if not window]
        if any(len(ids) < len(keys) or min(ids) <= 0 for ids in whole):
            self._drop_hold(self._num_stores)
            return  # vLLM has given blocks back, for which block 0 stands
        state.next_store = end
        state.has_stores = True
        spec = StoreSpec(
            request.request_id, first, tuple(keys), tuple(map(tuple, found)), self._num_stores
        )
        self._stores.append(spec)

    def _drop_hold(self, number: int) -> None:
        if self._held is not None:
            self._held.end_store(number)

    def on_ended(self, ended: TransfersEnded) -> None:
        """Notes that workers have ended loads and stores."""
        for owner, index in ended.wrong.items():
            self.counts["failed_loads"] += 1
            state = self._requests.get(self._loading.get(owner, ""))
            if state is not None:
                state.next_store = min(state.next_store, index)
                state.has_failed = True
        for owner, count in ended.ended.items():
            if self._is_ended(f"load {owner}", count) and owner in self._loading:
                self._end_load(owner)
        for number, count in ended.stored.items():
            if self._is_ended(f"store {number}", count):
                self._drop_hold(number)

    def _is_ended(self, name: str, count: int) -> bool:
        """Whether all ranks have reported the end of a transfer, which they may do in different
        steps."""
        self._ends[name] = self._ends.get(name, 0) + count
        if self._ends[name] < self._num_ranks:
            return False
        del self._ends[name]
        return True

    def _end_load(self, owner: str) -> None:
        self._loading.pop(owner, None)
        with self._lock:
            self._searches.pop(owner, None)
        if self._group:  # without a group, the pool has ended all holds with the connection
            self._link.send(Release(owner=owner, group=self._group))

    def on_finished(self, request: Any, table: BlockTable) -> bool:
        """Returns whether vLLM must keep the request's blocks until a worker allows their end."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.search is not None:
            self._release(state.search)
        self._note_full(state, lambda req_id: table)
        if self._held is not None:
            self._held.give_back(request.request_id)
        if state.has_stores:
            self._finished.append(request.request_id)
        return state.has_stores

    def _state(self, request: Any) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            keys = PromptKeys(request, self._block_tokens, self._adapters.content_of)
            state = self._requests[request.request_id] = _RequestState(request, keys)
        return state

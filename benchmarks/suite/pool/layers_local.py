"""The instance of `bench layers`: state machine, engine thread and messenger of a worker, without a
head."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.errors import BenchError
from benchmarks.suite.pool.layers_remote import SECRET, TIMEOUT_S, fill_with_floats
from moonpool.gc_tuning import settle_memory
from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import (
    AttemptId,
    AttemptSpec,
    PrefillDone,
    StartPrefill,
    StepTokens,
)
from moonpool.protocol.transfer_events import FetchEnded, LoadEnded, SendEnded, StoreEnded
from moonpool.scheduler.actions import (
    FinishStream,
    RunStep,
    SendBlocks,
    SendReport,
    StepFailed,
)
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory
from moonpool.types import BlockId, BlockKey, InstanceId, Role, SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.calibrate import fit_samples, measure_samples
from moonpool_engine.engine.device_choice import resolve_dtype
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.engine.ops import KvCache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.storage.tier_store import TierStore
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger, TransferLimits
from moonpool_engine.transfer.slice_copier import fastest_copier
from moonpool_engine.worker.engine_thread import EngineThread, LayerGates
from moonpool_engine.worker.profile_store import best_of
from moonpool_engine.worker.transfers import storage_by, transfers_by
from moonpool_lab.solo import solo_attempt

MEASUREMENTS = 3
"""The start of a prefill depends on the profiled times. An instance keeps the best profile of all
its starts, which a single measurement on a busy machine does not reach."""
THREADS = 1


@dataclass
class LayerwiseTimes:
    """Times of events in seconds since the command; 0 means that the event did not happen."""

    prefill_s: float = 0.0
    load_s: float = 0.0  # of the fetch or the load itself
    stored_s: float = 0.0
    early: bool = False
    held_block_s: float = 0.0  # blocks times seconds, until they are computed, or stored


@dataclass
class _Run:
    """One observed prefill, and the attempts that got tokens during it."""

    attempt_id: AttemptId
    took: LayerwiseTimes = field(default_factory=LayerwiseTimes)
    began_s: float = field(default_factory=time.perf_counter)
    noted_s: float = field(default_factory=time.perf_counter)
    answering: set[AttemptId] = field(default_factory=set)

    def note(self, action: SendReport) -> None:
        report = action.report
        if isinstance(report, StepTokens):
            self.answering |= {item.attempt_id for item in report.attempts}
        done = isinstance(report, PrefillDone) or self.attempt_id in self.answering
        if done and not self.took.prefill_s:
            self.took.prefill_s = time.perf_counter() - self.began_s


class LayerwiseInstance:
    """Runs one prefill at a time. `arena` is the engine's memory too."""

    def __init__(self, model: str, tokens: int, chunk_tokens: int, shared_memory: bool) -> None:
        loaded = open_model(model, resolve_dtype("auto"))
        ops = choose_ops(loaded.dtype)
        self.layout = make_layout(loaded, 64, ops)
        self.num_blocks = self.layout.blocks_for(tokens)
        self.arena = Arena(self.layout, self.num_blocks)
        fill_with_floats(self.arena)
        dtype = torch.bfloat16 if self.layout.dtype == "bfloat16" else torch.float32
        shape = (self.num_blocks, self.layout.num_layers, self.layout.slice_elements)
        blocks = torch.frombuffer(self.arena.buffer, dtype=dtype).view(shape)
        engine = Engine(loaded, ops, KvCache(blocks, self.layout))
        torch.set_num_threads(THREADS)  # as many as the measured thread of the engine has
        samples = measure_samples(engine)
        for _ in range(MEASUREMENTS - 1):
            samples = best_of(samples, measure_samples(engine))
        self.cost = fit_samples(samples)
        self._vocab = loaded.spec.vocab_size
        self._chunk_tokens = chunk_tokens
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gates = LayerGates()
        self._number = 0
        self._late: list[tuple[int, BlockId]] = []
        self._layer_wise_store = True
        self._store: TierStore | None = None
        self._stored: tuple[tuple[int, BlockKey], ...] = ()
        self._messenger = Messenger(
            self.arena,
            self.layout,
            LocalPeer(InstanceId("near"), SECRET, use_shared_memory=shared_memory),
            self._inbox.put,
            fastest_copier(self.arena, open_slices()),
            limits=TransferLimits(lease_s=TIMEOUT_S),
        )
        self._messenger.start()
        self._thread = EngineThread(engine, self._messenger, THREADS, self._inbox.put)
        self._thread.start()
        self.begin(False)
        settle_memory()

    def close(self) -> None:
        self._thread.stop(TIMEOUT_S)
        if self._store is not None:
            self._store.close()
        self._messenger.close()

    def use_store(self, open_it: Callable[[Arena, Callable[[Any], None]], TierStore]) -> None:
        """Adds a tier below DRAM."""
        self._store = open_it(self.arena, self._inbox.put)
        rate = self._store.read_bytes_per_s
        self.cost = replace(self.cost, ssd_read_bytes_per_s=rate)

    def put(self, tokens: Sequence[int]) -> None:
        """Puts the KVCache of these tokens, and nothing else, into the tier below DRAM."""
        assert self._store is not None
        root = root_key(self.layout.fingerprint, "")
        keys = block_keys(tokens, self.layout.block_tokens, root)
        blocks = [BlockId(number) for number in range(len(keys))]
        self._store.forget([slot for slot, _ in self._stored])
        self._store.store("prefix", keys, blocks, range(len(keys)))
        ended = self._inbox.get(timeout=TIMEOUT_S)
        if not isinstance(ended, StoreEnded) or ended.num_blocks < len(keys):
            raise BenchError(f"the prefix could not be stored: {ended}")
        self._stored = tuple(enumerate(keys))

    @property
    def next_work_id(self) -> str:
        """The id of the next prefill's work, by which its stream is named."""
        return str(self._number + 1)

    def tokens(self, count: int) -> list[int]:
        self._number += 1
        return [(self._number * 7919 + i * 104729) % self._vocab for i in range(count)]

    def begin(self, layer_wise_load: bool, layer_wise_store: bool = True) -> None:
        """Begins with an instance that holds nothing."""
        self._instance = self._new_instance(layer_wise_load)
        self._driver = InstanceDriver(self._instance, lambda: 0.0, self._performers())
        self._layer_wise_store = layer_wise_store

    def prefill(self, tokens: Sequence[int], expect_load: bool, **where: Any) -> LayerwiseTimes:
        """Computes until the first token is drawn and, with a target, until all is stored there."""
        work = self._work(tokens, 2 if where.get("target") else 1, 1e9)
        self._seen = run = _Run(work.attempt_id)
        self._inbox.put(StartPrefill(attempt=work, **where))
        while self._instance.requests or not run.took.prefill_s:
            self._turn()
        took = run.took
        took.early = bool(self._instance.counters.get("early_prefills"))
        if expect_load and not took.load_s:
            raise BenchError("the prefix was computed, not loaded")
        return took

    def prefill_inline(
        self, tokens: Sequence[int], decodes: Sequence[tuple[int, int]], tbt_s: float
    ) -> LayerwiseTimes:
        """Prefills inline in the batches of `decodes` (prompt, tokens), which need a token every
        `tbt_s`. Returns when all of them have ended."""
        beside = [self._work(self.tokens(prompt), most, tbt_s) for prompt, most in decodes]
        for work in beside:
            self._inbox.put(StartPrefill(attempt=work))
        self._seen = waiting = _Run(AttemptId(""))
        while not waiting.answering >= {work.attempt_id for work in beside}:
            self._turn()
        work = self._work(tokens, 1, 1e9)
        self._seen = run = _Run(work.attempt_id)
        self._inbox.put(StartPrefill(attempt=work))
        while self._instance.requests or not run.took.prefill_s:
            self._turn()
        return run.took

    def _work(self, tokens: Sequence[int], max_tokens: int, tbt_s: float) -> AttemptSpec:
        self._number += 1
        name, tokens = str(self._number), tuple(tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return solo_attempt(name, tokens, sampling, tbt_s=tbt_s, timeout_s=TIMEOUT_S)

    def _turn(self) -> None:
        """Handles the next event and its consequences."""
        run = self._seen
        event = self._inbox.get(timeout=TIMEOUT_S)
        now_s = time.perf_counter()
        held = self._instance.pool.owners().get(BlockOwner("work", run.attempt_id), 0)
        run.took.held_block_s += held * (now_s - run.noted_s)
        run.noted_s = now_s
        if isinstance(event, StepFailed):
            raise BenchError(event.message)
        if isinstance(event, FetchEnded | LoadEnded):
            run.took.load_s = event.seconds
        elif isinstance(event, SendEnded):
            run.took.stored_s = now_s - run.began_s
        self._driver.post(event)
        self._gates.note(event)

    def _new_instance(self, layer_wise_load: bool) -> Instance:
        config = InstanceConfig(
            chunk_tokens=self._chunk_tokens,
            layer_wise_load=layer_wise_load,
            ssd_blocks=0 if self._store is None else min(self._store.num_slots, self.num_blocks),
            store_shared=self._store is not None and self._store.shared,
        )
        layout, cost = self.layout, self.cost
        return Instance(
            config, layout, self.num_blocks, Role.MIXED, cost, (), InstanceMemory(self._stored)
        )

    def _performers(self) -> Performers:
        transfers = transfers_by(self._messenger, self.layout.num_layers, self._gates)

        def finish(action: FinishStream) -> None:
            transfers[SendBlocks](SendBlocks(action.stream_id, tuple(self._late)))
            self._late = []
            transfers[FinishStream](action)

        return {
            **transfers,
            **({} if self._store is None else storage_by(self._store, self._gates)),
            RunStep: self._run,
            FinishStream: finish,
            SendReport: lambda action: self._seen.note(action),
        }

    def _run(self, step: RunStep) -> None:
        """Without overlap: the blocks that a step completes are held back until the prompt is
        computed."""
        if not self._layer_wise_store:
            self._late += [send for entry in step.entries for send in entry.sends]
            step = replace(step, entries=tuple(e._replace(sends=()) for e in step.entries))
        self._thread.submit(step, self._gates.of_step(step))

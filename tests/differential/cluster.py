"""Runs a cluster in one process, with all the real parts except sockets to a head: arenas, engines,
messengers and state machines. The cluster keeps the logits behind every drawn token, so that paths
can be compared bit by bit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.engine.single_instance import FREE
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptSpec,
    PrefillDone,
    PrefillStarted,
    PrefixSource,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    StepTokens,
    TransferDone,
)
from moonpool.scheduler.actions import ExpectStream, FetchBlocks, RunStep, SendReport, StepEnded
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool.types import InstanceId, Role
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.cuda.host_sync import HostGpuSync
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.ops import KvCache, Ops, empty_cache
from moonpool_engine.engine.runner import Engine, make_layout
from moonpool_engine.engine.slices import ROWS_INNER
from moonpool_engine.transfer.arena import Arena, Checksum, checksum_slice
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.transfer.slice_copier import PlainSliceCopier
from moonpool_engine.worker.engine_thread import (
    Drafting,
    LayerGates,
    LayerWaits,
    begin_writing,
    send_layer,
)
from moonpool_engine.worker.transfers import transfers_by

SECRET = b"differential tests"
MODEL = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=96,vocab=300"


@dataclass
class Outcome:
    """Holds the results of one attempt. `logits` maps the position of a drawn token to [vocab]."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    fetched_tokens: int = 0
    transferred_bytes: int = 0
    finished: bool = False


class Liar:
    """A checksum function that is wrong for one slice in seven, so that the receiver considers
    these slices damaged."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, data: memoryview) -> int:
        self._calls += 1
        return checksum_slice(data) ^ (self._calls % 7 == 3)


class Leaver:
    """A checksum function whose n-th call ends the messenger, as if its process had died."""

    def __init__(self, node: Node, after: int) -> None:
        self._node, self._left = node, after

    def __call__(self, data: memoryview) -> int:
        self._left -= 1
        if self._left == 0:
            threading.Thread(target=self._node.messenger.close).start()
            # The pause lets this read break off, and no further request can come after it.
            time.sleep(0.3)
        return checksum_slice(data)


class Node:
    """Is one instance of the cluster."""

    driver: InstanceDriver

    def __init__(
        self, name: str, role: Role, dtype: str, ops: Ops, options: dict[str, Any], inbox: Any
    ) -> None:
        model = open_model(options.get("model", MODEL), dtype)
        self.layout = make_layout(model, options.get("block_tokens", 16), ops)
        self.arena = Arena(self.layout, 256)
        flat = torch.frombuffer(
            self.arena.buffer, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32
        )
        # Blocks are filled with NaN, so that a read of one byte too many is noticed.
        flat.fill_(float("nan"))
        shape = (256, self.layout.num_layers, self.layout.slice_elements)
        arena = KvCache(flat.view(shape), self.layout)
        if self.layout.inner == ROWS_INNER:  # the layout of a GPU, which has separate blocks
            cache = empty_cache(self.layout, 256, ops.device)
            cache.blocks.fill_(float("nan"))
            self.engine = Engine(model, ops, cache, HostGpuSync(cache, arena.blocks))
        else:
            self.engine = Engine(model, ops, arena)
        self.messenger = Messenger(
            self.arena,
            self.layout,
            LocalPeer(
                InstanceId(name), SECRET, use_shared_memory=options.get("shared_memory", True)
            ),
            lambda event: inbox.put((self, event)),
            PlainSliceCopier(self._checksum(name, options)),
        )
        self.address = self.messenger.start()
        config = InstanceConfig(
            chunk_tokens=options.get("chunk_tokens", 64),
            max_sequences=16,
            prefix_caching=options.get("prefix_caching", True),
            layer_wise_load=options.get("layer_wise_load", False),
            speculative=options.get("speculative"),
            kept_tokens=0 if options.get("keeps_all") else model.spec.kept_tokens,
        )
        self.gates = LayerGates()
        self.drafter, draft_place = self._draft_model(dtype, ops, role, options)
        cost = options.get("cost", FREE)
        self.instance = Instance(config, self.layout, 256, role, cost, (), draft_model=draft_place)

    def _draft_model(
        self, dtype: str, ops: Ops, role: Role, options: dict[str, Any]
    ) -> tuple[Drafter | None, DraftModelPlace | None]:
        if "draft_model" not in options or role is Role.PREFILL:
            return None, None
        model, num_blocks = open_model(options["draft_model"], dtype), options["draft_blocks"]
        drafter = Drafter(model, ops, num_blocks, 16, self.engine.spec.vocab_size)
        drafter.engine.cache.blocks.fill_(float("nan"))
        cost = options.get("draft_cost", FREE)
        return drafter, DraftModelPlace(cost, num_blocks, 16, model.spec.max_positions)

    def _checksum(self, name: str, options: dict[str, Any]) -> Checksum:
        leaves_after = options.get("leaves_after", {})
        if name in leaves_after:
            return Leaver(self, leaves_after[name])
        return Liar() if name in options.get("liars", ()) else checksum_slice


class MiniCluster:
    """Holds nodes by name, runs the loop that drives them, and takes the place of the Conductor."""

    def __init__(self, roles: dict[str, Role], dtype: str, ops: Ops, **options: Any) -> None:
        self.inbox: queue.Queue[tuple[Node, Any]] = queue.Queue()
        self.nodes = {
            name: Node(name, role, dtype, ops, options, self.inbox) for name, role in roles.items()
        }
        for node in self.nodes.values():
            node.driver = self._drive(node)
        self.outcomes: dict[str, Outcome] = {}
        self.corrupt_slices = 0  # counts the slices that ended streams found damaged
        self.missed_steps = 0
        self.after_step: Callable[[], None] = lambda: None
        self._decode_of: dict[str, Node] = {}

    @property
    def block_tokens(self) -> int:
        return next(iter(self.nodes.values())).layout.block_tokens

    def submit(
        self, work: AttemptSpec, on: str, decode: str | None = None, fetch_from: str | None = None
    ) -> None:
        self.outcomes[work.attempt_id] = Outcome()
        target = fetch = None
        if decode is not None:
            self._decode_of[work.attempt_id] = self.nodes[decode]
            self.inbox.put((self.nodes[decode], ReserveDecode(attempt=work)))
            target = self.nodes[decode].address
        if fetch_from is not None:
            fetch = PrefixSource(source=self.nodes[fetch_from].address, num_blocks=10_000)
        self.inbox.put((self.nodes[on], StartPrefill(attempt=work, fetch=fetch, target=target)))

    def run(self, timeout_s: float = 60.0) -> None:
        """Runs until all submitted attempts have ended and no block is held."""
        deadline = time.monotonic() + timeout_s
        while not all(o.finished for o in self.outcomes.values()) or self._busy():
            assert time.monotonic() < deadline, self.outcomes
            try:
                node, event = self.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            node.driver.post(event)
            node.gates.note(event)
            node.instance.validate()
            if isinstance(event, StepEnded):
                self.after_step()

    def close(self) -> None:
        for node in self.nodes.values():
            node.messenger.close()
        for node in self.nodes.values():
            del node.engine
            node.arena.close()

    def _busy(self) -> bool:
        return any(n.instance.requests or n.instance.pool.num_held for n in self.nodes.values())

    def _drive(self, node: Node) -> InstanceDriver:
        transfers = transfers_by(node.messenger, node.layout.num_layers, node.gates)

        def arriving(action: FetchBlocks | ExpectStream) -> None:
            if node.engine.host_sync is not None:
                node.engine.host_sync.arriving(action.block_ids)
            transfers[type(action)](action)

        performers: Performers = {
            **transfers,
            FetchBlocks: arriving,
            ExpectStream: arriving,
            RunStep: lambda step: self.inbox.put((node, self._step(node, step))),
            SendReport: lambda action: self._hear(action.report),
        }
        return InstanceDriver(node.instance, lambda: 0.0, performers)

    def _step(self, node: Node, step: RunStep) -> StepEnded:
        step, drafted, _ = Drafting(node.drafter).run(step)
        begin_writing(node.messenger, step)
        gates = node.gates.of_step(step)
        waits = LayerWaits(step, gates)

        def on_layer(layer: int) -> None:
            send_layer(node.messenger, waits.sound(), layer)

        seen: list[Tensor] = []
        forward = node.engine.model.forward

        def spy(*arguments: Any) -> Tensor | None:
            logits = forward(*arguments)
            if logits is not None:
                seen.append(logits.clone())
            return logits

        node.engine.model.forward = spy  # type: ignore[method-assign]
        result = node.engine.step(step.entries, on_layer, waits.before_attend)
        waits.before_attend(node.layout.num_layers - 1)
        self.missed_steps += len(waits.missed)
        node.engine.model.forward = forward  # type: ignore[method-assign]
        drawing = [e for e in step.entries if e.draw]
        row = 0
        for entry in drawing:
            first = entry.start + len(entry.new_token_ids) - entry.num_drafts
            further = result.further.get(step.entries.index(entry), ())
            for number in range(1 + len(further)) if entry in waits.sound() else ():
                self.outcomes[entry.attempt_id].logits[first + number] = seen[0][row + number]
            row += 1 + entry.num_drafts
        return StepEnded(
            result.tokens,
            result.seconds,
            waits.missed,
            further=result.further,
            drafted=drafted,
        )

    def _hear(self, report: Any) -> None:
        match report:
            case PrefillStarted():
                outcome = self.outcomes[report.attempt_id]
                outcome.cached_tokens = report.cached_tokens
                outcome.fetched_tokens = report.fetched_tokens
            case PrefillDone():
                self.outcomes[report.attempt_id].tokens.append(report.token.token_id)
                self.outcomes[report.attempt_id].finished = report.finish is not None
                start = StartDecode(attempt_id=report.attempt_id, token=report.token)
                self.inbox.put((self._decode_of[report.attempt_id], start))
            case TransferDone():
                assert not report.error, report
                self.corrupt_slices += report.corrupt_slices
                self.outcomes[report.attempt_id].transferred_bytes = report.num_bytes
            case StepTokens():
                for item in report.attempts:
                    outcome = self.outcomes[item.attempt_id]
                    outcome.tokens.extend(t.token_id for t in item.tokens)
                    outcome.finished = item.finish is not None
            case AttemptFailed():
                raise AssertionError(report)

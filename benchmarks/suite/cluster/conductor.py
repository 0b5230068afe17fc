"""Measures the cost of a decision: a Conductor without a cluster gets the events of a busy cluster.

Instances share the first block of all prompts (a system prompt), and hold conversations, one of
which each new request continues. Each instance has `in_flight` requests under way. Only
`Conductor.handle` is timed, each event separately, in CPU time, so that other work on the machine
matters less.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from time import thread_time_ns
from typing import Any

from moonpool.conductor.actions import (
    ConductorAction,
    InstanceJoined,
    Reported,
    RequestArrived,
    RequestCancelled,
    Send,
)
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import FittedCost
from moonpool.distributions import nearest_rank
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    AttemptSpec,
    AttemptTokens,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    InstanceInfo,
    PrefillDone,
    PrefillStarted,
    ReserveDecode,
    StartPrefill,
    StepTokens,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import (
    BlockKey,
    InstanceId,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Slo,
    Token,
)

BLOCK_TOKENS = 512
PROMPT_BLOCKS = 24  # 12,288 tokens, about the mean of the conversation trace
LAYOUT = BlockLayout(
    model_fingerprint="bench",
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
    num_layers=80,
    num_kv_heads=8,
    head_dim=128,
)
COST = FittedCost(
    prefill=(0.0933, 1.0893e-4, 7.62e-10, 1.973e-9),
    decode=(0.0245, 0.0004, 3.45e-8),
    shared_memory_bytes_per_s=1e11,
    network_bytes_per_s=8.7e10,
)
ANSWER_TOKENS = 343
NEVER_S = 1e9


def bench_conductor(
    fleets: Sequence[int],
    blocks_per_instance: int,
    in_flight: int,
    decisions: int,
    config: ConductorConfig,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns microseconds per event for fleets of this many instances, half of them for
    prefill."""
    found: dict[str, Any] = {}
    for num_instances in fleets:
        desk = _PlayedCluster(num_instances, blocks_per_instance, config)
        desk.fill(num_instances * in_flight)
        gc.collect()
        gc.freeze()
        figures = desk.measure(decisions)
        gc.unfreeze()
        figures["indexed_blocks"] = len(desk.conductor.index)
        figures["in_flight"] = len(desk.conductor.requests)
        found[f"instances_{num_instances}"] = figures
        decision = figures["decision_us"]
        say(
            f"{num_instances} instances, {figures['indexed_blocks']} blocks indexed,"
            f" {figures['in_flight']} requests under way: a decision by"
            f" {config.placement} and {config.admission} takes {decision['median']:.0f} us"
            f" (best tenth {decision['best_tenth']:.0f} us, P99 {decision['p99']:.0f} us)"
        )
    return found | {"placement": config.placement, "admission": config.admission}


class _PlayedCluster:
    """A Conductor whose cluster is played by the benchmark."""

    def __init__(
        self, num_instances: int, blocks_per_instance: int, config: ConductorConfig
    ) -> None:
        assert num_instances >= 2
        self.conductor = Conductor(config)
        self.now = 0.0
        self.names: list[InstanceId] = []
        self._number = 0
        self._conversations = num_instances * blocks_per_instance // PROMPT_BLOCKS
        for row in range(num_instances):
            role = Role.PREFILL if row < (num_instances + 1) // 2 else Role.DECODE
            self._join(InstanceId(f"{role.value}{row}"), role, row)
        for row, name in enumerate(self.names):
            keys = list(self._held(row, num_instances, blocks_per_instance))
            self._post(name, BlocksSnapshot(next_sequence=0, keys=tuple(keys)))

    def fill(self, count: int) -> None:
        """Brings this many requests under way, three of four of them decoding."""
        for number in range(count):
            self.now += 0.001
            actions = self.conductor.handle(RequestArrived(self._request()), self.now)
            if number % 4:
                self._let_it_decode(actions)

    def measure(self, decisions: int) -> dict[str, Any]:
        decided, ended, stepped, announced = [], [], [], []
        works = self._running_works()
        for number in range(decisions):
            self.now += 0.001
            event = RequestArrived(self._request())
            decided.append(self._time(event))
            ended.append(self._time(RequestCancelled(event.request.request_id)))
            name = self.names[-1 - number % (len(self.names) // 2)]
            step = StepTokens(attempts=works.get(name, ()))
            stepped.append(self._time(Reported(name, step)) / max(len(step.attempts), 1))
            keys = tuple(_key(1 << 40 | number, index) for index in range(PROMPT_BLOCKS))
            change = BlocksChanged(sequence=2 * (number // (len(self.names) // 2)), stored=keys)
            announced.append(self._time(Reported(name, change)) / len(keys))
            undo = BlocksChanged(sequence=change.sequence + 1, removed=keys)
            self._post(name, undo)
        return {
            "decision_us": _summary(decided),
            "ending_us": _summary(ended),
            "token_us": _summary(stepped),
            "block_us": _summary(announced),
        }

    def _time(self, event: Any) -> int:
        began_ns = thread_time_ns()
        self.conductor.handle(event, self.now)
        return thread_time_ns() - began_ns

    def _post(self, name: InstanceId, report: Any) -> list[ConductorAction]:
        return self.conductor.handle(Reported(name, report), self.now)

    def _join(self, name: InstanceId, role: Role, row: int) -> None:
        address = PeerAddress(
            instance_id=name, host_id=f"h{row}", unix_name="", tcp_host="x", tcp_port=1
        )
        info = InstanceInfo(
            instance_id=name,
            role=role,
            incarnation=1,
            address=address,
            layout=LAYOUT,
            num_blocks=20_000,
            cost=COST,
            pid=1,
            host="x",
        )
        self.names.append(name)
        self.conductor.handle(InstanceJoined(info), self.now)

    def _held(self, row: int, num_instances: int, num_blocks: int) -> Iterable[BlockKey]:
        """Yields the shared block, and conversations, every third of which also lies on another
        instance."""
        yield _key(0, 0)
        for conversation in range(row, self._conversations, num_instances):
            for index in range(1, PROMPT_BLOCKS):
                yield _key(conversation + 1, index)
        other = (row + 1) % num_instances
        for conversation in range(other, self._conversations, 3 * num_instances):
            for index in range(1, PROMPT_BLOCKS // 2):
                yield _key(conversation + 1, index)

    def _request(self) -> Request:
        self._number += 1
        conversation = self._number * 7919 % self._conversations + 1
        num_blocks = PROMPT_BLOCKS + 4  # one turn more than what is held
        keys = (_key(0, 0), *(_key(conversation, index) for index in range(1, num_blocks)))
        return Request(
            request_id=RequestId(f"r{self._number}"),
            token_ids=range(num_blocks * BLOCK_TOKENS + 100),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            slo=Slo(ttft_s=NEVER_S, tbt_s=NEVER_S),
            arrived_s=self.now,
            deadline_s=NEVER_S,
            keys=keys,
        )

    def _let_it_decode(self, actions: list[ConductorAction]) -> None:
        work, prefill, decode = _placed(actions)
        started = PrefillStarted(attempt_id=work.attempt_id, cached_tokens=0, fetched_tokens=0)
        self._post(prefill, started)
        self._post(prefill, PrefillDone(attempt_id=work.attempt_id, token=Token(1)))
        self._post(decode, DecodeAccepted(attempt_id=work.attempt_id))

    def _running_works(self) -> dict[InstanceId, tuple[AttemptTokens, ...]]:
        """One more token for each answer that is decoding, by instance."""
        works: dict[InstanceId, list[AttemptTokens]] = {}
        for tracked in self.conductor.requests.values():
            attempt = tracked.attempt
            if attempt is not None and attempt.decoding_since_s is not None:
                item = AttemptTokens(attempt_id=attempt.attempt_id, tokens=(Token(1),))
                works.setdefault(attempt.decoder, []).append(item)
        return {name: tuple(items) for name, items in works.items()}


def _placed(actions: list[ConductorAction]) -> tuple[AttemptSpec, InstanceId, InstanceId]:
    reserve, start = (a for a in actions if isinstance(a, Send))
    assert isinstance(reserve.command, ReserveDecode) and isinstance(start.command, StartPrefill)
    return start.command.attempt, start.instance_id, reserve.instance_id


def _key(conversation: int, index: int) -> BlockKey:
    return BlockKey((conversation << 32 | index).to_bytes(16, "little"))


def _summary(times_ns: Sequence[float]) -> dict[str, float]:
    times_us = sorted(t / 1e3 for t in times_ns)
    tenth = times_us[: max(len(times_us) // 10, 1)]
    return {
        "median": statistics.median(times_us),
        "best_tenth": statistics.fmean(tenth),
        "p99": nearest_rank(times_us, 0.99),
    }

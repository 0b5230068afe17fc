"""Runs vLLMs of a known speed behind a Conductor in virtual time. The state machines are those of
the live cluster, and the times are those of the simulated vLLM that `moonpool bench routers`
serves.

    python -m tests.sim.timed_vllms --workload agents --loads 0.9,1.5 --seconds 20

prints the requests served within both SLOs. Before the measured part, the same workload runs at
half of the capacity, so that the Conductor learns. The figures change only if decisions change,
because even the jitter of the servers' steps is the same each time.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from benchmarks.suite.conversations.player import PlayedTurn, program_figures
from benchmarks.suite.conversations.program_call import ProgramCall
from benchmarks.suite.conversations.sessions import Session, SessionTurn
from benchmarks.suite.routers.stub_server import block_event
from benchmarks.suite.routers.timed_engine import (
    EngineSize,
    EngineSpeed,
    TimedEngine,
    TimedRequest,
)
from benchmarks.suite.routers.workloads import WORKLOADS, arriving
from moonpool.conductor.actions import (
    Deliver,
    InstanceJoined,
    Refuse,
    Reported,
    RequestArrived,
    Send,
    Tick,
)
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import FittedCost
from moonpool.distributions import percentiles
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId, InstanceInfo, StartPrefill
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.request_record import RequestRecord
from moonpool.scheduler.actions import SendReport
from moonpool.sim.clock import Clock, Priority
from moonpool.trace.closed_loop import retry_after_s
from moonpool.types import (
    FinishReason,
    InstanceId,
    ProgramContext,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Slo,
    Token,
)
from moonpool.vllm.actions import (
    CacheEventsReceived,
    CancelRequest,
    EngineOutput,
    EngineStepEnded,
    FlushStep,
    SubmitRequest,
    VllmAction,
    VllmEvent,
)
from moonpool.vllm.events import read_batch
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.measure import FAR_BYTES_PER_S
from moonpool.vllm.worker import STEP_S
from tests.sim.timed_routers import (
    CacheAwareRouter,
    ProgramQueueRouter,
    RoutedCall,
    Sent,
    TimedRouter,
)

LAYOUT = BlockLayout("m", "float32", EngineSize().block_tokens, 1, 1, 64)
TICK_S = 0.1
HOP_S = 0.001
"""The time of a message in either direction."""


class _Vllm:
    """One server, and the instance in front of it."""

    def __init__(self, fleet: TimedVllms, name: str, size: EngineSize, speed: EngineSpeed) -> None:
        self.fleet, self.clock = fleet, fleet.clock
        self.name = InstanceId(name)
        self.engine = TimedEngine(size, speed)
        self.layout = fleet.layout
        self.instance = VllmInstance(self.layout, size.num_blocks, Role.MIXED, True)
        self.busy = False
        self.speed = speed
        self._rng = random.Random(name)

    def info(self, number: int) -> InstanceInfo:
        s, f = self.speed, self.speed.factor
        cost = FittedCost(
            prefill=(f * (s.step_s + s.answer_s), f * s.prompt_token_s, 0.0, 0.0),
            decode=(f * s.step_s, f * s.answer_s, f * s.context_token_s),
            shared_memory_bytes_per_s=FAR_BYTES_PER_S,
            network_bytes_per_s=FAR_BYTES_PER_S,
        )
        return InstanceInfo(
            instance_id=self.name,
            role=Role.MIXED,
            incarnation=1,
            address=PeerAddress(self.name, "", "", "127.0.0.1", 1000 + number),
            layout=self.layout,
            num_blocks=self.engine.size.num_blocks,
            cost=cost,
            pid=number + 1,
            host="here",
        )

    def post(self, event: VllmEvent) -> None:
        for action in self.instance.handle(event, self.clock.now):
            self.perform(action)

    def perform(self, action: VllmAction) -> None:
        match action:
            case SendReport():
                self.fleet.report(self.name, action.report)
            case SubmitRequest():
                attempt = action.attempt
                tokens = list(attempt.token_ids)
                self.submit(attempt.attempt_id, tokens, attempt.sampling.max_tokens)
            case CancelRequest():
                self.engine.cancel(action.attempt_id)
            case FlushStep():
                self.clock.after(STEP_S, Priority.MESSAGE, self.post, EngineStepEnded())

    def submit(self, name: str, tokens: list[int], max_tokens: int) -> None:
        self.engine.submit(TimedRequest(name, tokens, len(tokens), max_tokens))
        self._begin()

    def _begin(self) -> None:
        if self.busy:
            return
        took_s = self.engine.begin_step()
        if took_s:
            self.busy = True
            if self.fleet.jitter:
                took_s *= 1.0 + self._rng.expovariate(1.0 / self.fleet.jitter)
            self.clock.after(took_s, Priority.STEP_END, self._end)

    def _end(self) -> None:
        self.busy = False
        tokens = self.engine.end_step()
        news, self.engine.news = self.engine.news, []
        if news and self.fleet.router is None:
            events = [block_event(one, self.engine.size.block_tokens) for one in news]
            payload = msgspec.msgpack.encode([self.clock.now, events, 0])
            self.clock.after(
                HOP_S, Priority.MESSAGE, self.post, CacheEventsReceived(read_batch(payload))
            )
        for token in tokens:
            self.fleet.hit_tokens += token.cached if token.is_last else 0
            finish = FinishReason.LENGTH if token.is_last else None
            if self.fleet.router is not None:
                told = RequestId(token.name), (token.token,), finish
                self.clock.after(2 * HOP_S, Priority.MESSAGE, self.fleet.deliver, *told)
                continue
            output = EngineOutput(AttemptId(token.name), (Token(token.token),), finish)
            self.clock.after(HOP_S, Priority.MESSAGE, self.post, output)
        self._begin()


@dataclass(slots=True)
class _Client:
    session: Session
    program: int = -1  # -1 if the calls name no program
    number: int = 0
    num_refused: int = 0  # number of refused tries of the present turn
    record: RequestRecord | None = None  # the record of the present turn
    said: list[int] = field(default_factory=list)


class TimedVllms:
    """Plays sessions to a Conductor in front of servers with these speeds. `records` has the
    clients' records."""

    def __init__(
        self,
        config: ConductorConfig,
        slo: Slo,
        speeds: Sequence[float] = (1.0, 1.0, 1.0),
        size: EngineSize | None = None,
        jitter: float = 0.0,
        router: TimedRouter | None = None,
    ) -> None:
        """`jitter` is the mean share by which a step takes longer, at random (exponential).
        `router` replaces the Conductor."""
        self.clock, self.slo, self.jitter, self.router = Clock(), slo, jitter, router
        self.layout = LAYOUT
        self.conductor = Conductor(config, default_slo=slo)
        size = size or EngineSize()
        self.servers = {
            f"vllm-{n}": _Vllm(self, f"vllm-{n}", size, EngineSpeed(factor=f))
            for n, f in enumerate(speeds)
        }
        self.records: list[RequestRecord] = []
        self.refused: list[str] = []
        self.calls: list[PlayedTurn] = []
        self._routed: dict[RequestId, RoutedCall] = {}
        self._num_requests = 0
        self.num_programs = 0  # the number of the next program
        self._under_way: dict[RequestId, tuple[_Client, RequestRecord, list[int], SessionTurn]] = {}
        self._until_s = inf
        self.longest_wait_s = 0.0  # the longest time of a placement since `forget`
        self.hit_tokens = 0  # prompt tokens of complete answers that were cached, since `forget`
        for n, server in enumerate(self.servers.values()):
            self._post(InstanceJoined(server.info(n)))

    @property
    def num_effective(self) -> int:
        return sum(record.effective for record in self.records)

    def forget(self) -> None:
        """Resets the figures, but not the Conductor's learned state."""
        self.records.clear()
        self.refused.clear()
        self.calls.clear()
        self.longest_wait_s, self.hit_tokens = 0.0, 0

    def play(self, sessions: Sequence[Session], seconds: float, programs: bool = False) -> None:
        """With `programs`, each session is a program. A program that has begun continues to its
        end, and a refused call is sent again."""
        start = self.clock.now
        self._until_s = start + seconds
        for session in sessions:
            client = _Client(session)
            if programs:
                client.program, self.num_programs = self.num_programs, self.num_programs + 1
            self.clock.at(start + session.started_s, Priority.ARRIVAL, self._turn, client)
        self.clock.after(TICK_S, Priority.TICK, self._tick)
        self.clock.run()

    def report(self, name: InstanceId, report: object) -> None:
        self.clock.after(HOP_S, Priority.MESSAGE, self._post, Reported(name, report))

    def _tick(self) -> None:
        if self.router is None:
            self._post(Tick())
        else:
            waiting = [len(server.engine.waiting) for server in self.servers.values()]
            self._forward(self.router.tick(waiting, self.clock.now))
        if self._under_way or self.clock.now < self._until_s:
            self.clock.after(TICK_S, Priority.TICK, self._tick)

    def _turn(self, client: _Client) -> None:
        if self.clock.now > self._until_s and client.program < 0:
            return
        client.said += client.session.turns[client.number].new_tokens
        client.num_refused = 0
        name = RequestId(f"t{len(self.records)}")
        client.record = RequestRecord(name, len(client.said), self.slo, self.clock.now)
        self.records.append(client.record)
        self._try(client)

    def _try(self, client: _Client) -> None:
        now, turn = self.clock.now, client.session.turns[client.number]
        name, self._num_requests = RequestId(f"r{self._num_requests}"), self._num_requests + 1
        assert client.record is not None
        self._under_way[name] = client, client.record, [], turn
        ends = client.number == len(client.session.turns) - 1
        if self.router is not None:
            call = RoutedCall(name, tuple(client.said), turn.answer_tokens, client.program, ends)
            self._routed[name] = call
            self._forward(self.router.arrived(call, now))
            return
        context = None
        if client.program >= 0:
            context = ProgramContext(
                program_id=f"p{client.program}", expected_tokens=turn.answer_tokens, ends=ends
            )
        request = Request(
            request_id=name,
            token_ids=tuple(client.said),
            sampling=SamplingParams(max_tokens=turn.answer_tokens, temperature=0, ignore_eos=True),
            slo=self.slo,
            arrived_s=now,
            deadline_s=now + 300.0,
            program=context,
        )
        self._post(RequestArrived(request))

    def _forward(self, sent: Sent) -> None:
        servers = list(self.servers.values())
        for call, number in sent:
            told = call.name, list(call.tokens), call.answer_tokens
            self.clock.after(HOP_S, Priority.MESSAGE, servers[number].submit, *told)

    def deliver(
        self, name: RequestId, new_tokens: Sequence[int], finish: FinishReason | None
    ) -> None:
        client, record, tokens, _ = self._under_way[name]
        tokens += new_tokens
        if new_tokens:
            record.note_tokens(len(new_tokens), self.clock.now)
        if finish is None:
            return
        record.outcome = finish
        record.finished_s = self.clock.now
        del self._under_way[name]
        if self.router is not None:
            self._forward(self.router.ended(self._routed.pop(name), self.clock.now))
        client.said += tokens
        self._note_end(client, 200)
        self._next(client)

    def _note_wait(self, command: StartPrefill) -> None:
        name = RequestId(command.attempt.attempt_id.partition("/")[0])
        waited_s = self.clock.now - self._under_way[name][1].arrived_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)

    def _refuse(self, client: _Client, status: int, told_s: float | None) -> None:
        """Handles a refusal: a program sends its call again, and the user of another session
        continues."""
        client.num_refused += 1
        wait_s = retry_after_s(status, client.num_refused, told_s) if client.program >= 0 else None
        if wait_s is not None:
            self.clock.after(wait_s, Priority.ARRIVAL, self._try, client)
            return
        self._note_end(client, status)
        if client.program < 0:
            self._next(client)

    def _note_end(self, client: _Client, status: int) -> None:
        assert client.record is not None
        if client.program >= 0:
            is_last = client.number == len(client.session.turns) - 1
            call = ProgramCall(client.program, client.number, is_last)
            client.record.finished_s = self.clock.now
            self.calls.append(
                PlayedTurn(client.record, 0.0, status, "", "", client.num_refused, call)
            )

    def _next(self, client: _Client) -> None:
        client.number += 1
        if client.number < len(client.session.turns):
            wait_s = client.session.turns[client.number].think_s
            self.clock.after(wait_s, Priority.ARRIVAL, self._turn, client)

    def _post(self, event: object) -> None:
        for action in self.conductor.handle(event, self.clock.now):
            match action:
                case Send():
                    server = self.servers[action.instance_id]
                    self.clock.after(HOP_S, Priority.MESSAGE, server.post, action.command)
                    if isinstance(action.command, StartPrefill):
                        self._note_wait(action.command)
                case Deliver():
                    tokens = [token.token_id for token in action.tokens]
                    self.deliver(action.request_id, tokens, action.finish)
                case Refuse():
                    client, record, _, _ = self._under_way.pop(action.request_id)
                    record.outcome, why = action.refusal.reason, action.refusal
                    self.refused.append(why.reason)
                    self._refuse(client, why.status, why.retry_after_s)


CASES = {
    "conversations": (22.2, Slo(ttft_s=0.73, tbt_s=0.0525)),
    "agents": (30.0, Slo(ttft_s=0.73, tbt_s=0.0525)),
    "mixed": (23.0, Slo(ttft_s=1.62, tbt_s=0.0532)),
}
"""The requests per second that three servers answer at load 1, and the SLOs, by workload."""


ROUTERS: dict[str, Callable[[int], TimedRouter]] = {
    "cache_aware": CacheAwareRouter,
    "programs": lambda count: ProgramQueueRouter(count, EngineSize().kv_tokens),
}


class ServerTimes(msgspec.Struct, frozen=True):
    """`factors` say how slow each server is beside the others. `slow` makes all servers slower and
    their SLOs longer by this factor; tools keep their speed. `tbt_s` replaces the workload's SLO.
    For `jitter`, see `TimedVllms`. `router` is one of `ROUTERS`, or "" for the Conductor."""

    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    slow: float = 1.0
    tbt_s: float | None = None
    jitter: float = 0.0
    router: str = ""

    def rate(self, name: str) -> float:
        """Returns the requests per second of a workload at load 1."""
        return CASES[name][0] / self.slow * sum(1.0 / factor for factor in self.factors) / 3.0

    def fleet(self, name: str, config: ConductorConfig) -> TimedVllms:
        slo = CASES[name][1]
        slo = Slo(ttft_s=self.slow * slo.ttft_s, tbt_s=self.tbt_s or self.slow * slo.tbt_s)
        speeds = tuple(self.slow * factor for factor in self.factors)
        router = ROUTERS[self.router](len(speeds)) if self.router else None
        return TimedVllms(config, slo, speeds, jitter=self.jitter, router=router)


def played(
    name: str,
    load: float,
    seconds: float,
    config: ConductorConfig | None = None,
    times: ServerTimes = ServerTimes(),  # noqa: B008
    programs: bool = True,
    before: float = 0.5,
    number: int = 0,
) -> TimedVllms:
    """Runs a workload at the share `before` of the capacity, and then at the load that is measured.
    Each `number` has other sessions."""
    workload = WORKLOADS[name]
    fleet = times.fleet(name, config or ConductorConfig())
    fleet.num_programs = 1_000_000 * number
    for each in (before, load):
        if each:
            fleet.forget()
            seed = round(100 * each) + 1000 * number
            sessions = arriving(workload, each * times.rate(name) / workload.turns, seconds, seed)
            fleet.play(sessions, seconds, programs and workload.programs)
    return fleet


def _line(name: str, load: float, fleets: Sequence[TimedVllms]) -> str:
    records = [record for fleet in fleets for record in fleet.records]
    whole = [record for record in records if record.outcome == "length"]
    ttft_s = [record.ttft_s or 0.0 for record in whole]
    gaps_s = [gap_s for record in whole for gap_s in record.gaps_s]
    prompt = sum(record.num_prompt_tokens for record in whole)
    in_time = sum(fleet.num_effective for fleet in fleets)
    refused = Counter(reason for fleet in fleets for reason in fleet.refused)
    why = "".join(f" {reason} {count}" for reason, count in refused.most_common())
    hits = sum(fleet.hit_tokens for fleet in fleets) / max(prompt, 1)
    return (
        f"{name} {load:g} x: {in_time} of {len(records)} within both SLOs,"
        f" {refused.total()} refused{f' ({why.strip()})' if why else ''},"
        f" {len(whole) - in_time} late, hits {hits:.0%},"
        f" TTFT mean {1e3 * sum(ttft_s) / max(len(ttft_s), 1):.0f} ms,"
        f" P99 {1e3 * percentiles(ttft_s, 99)['p99']:.0f} ms,"
        f" TBT mean {1e3 * sum(gaps_s) / max(len(gaps_s), 1):.1f} ms{_program_words(fleets)}\n"
    )


def _program_words(fleets: Sequence[TimedVllms]) -> str:
    calls = [fleet.calls for fleet in fleets]
    if not calls[0]:
        return ""
    found = program_figures([call for one in calls for call in one])
    shown = (f"{name.upper()} {value or inf:.1f} s" for name, value in found["makespan_s"].items())
    return f", programs {found['finished']} of {found['begun']}, {', '.join(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--workload", action="append", choices=tuple(CASES), help="All unless given."
    )
    parser.add_argument("--loads", default="0.8,1.5,2.5", help="Multiples of the capacity.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--admission", default="goodput")
    parser.add_argument("--no-decode-wait", action="store_true")
    parser.add_argument("--programs", choices=("off", "named"), default="named")
    parser.add_argument("--sessions", action="store_true", help="Agents name no programs.")
    parser.add_argument("--slow", type=float, default=1.0, help="Servers that much slower.")
    parser.add_argument("--factors", default="1,1,1", help="How slow each is beside the others.")
    parser.add_argument("--slo-tbt", type=float, help="In place of the workload's.")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="Share by which a step takes longer at random."
    )
    parser.add_argument(
        "--before", type=float, default=0.5, help="Load of the play before; 0: none."
    )
    parser.add_argument("--router", choices=tuple(ROUTERS), default="", help="vllm-router's way.")
    parser.add_argument("--plays", type=int, default=1, help="With other sessions; summed up.")
    asked = parser.parse_args()
    config = ConductorConfig(
        admission=asked.admission,
        decode_wait=not asked.no_decode_wait,
        programs=asked.programs,
    )
    factors = tuple(map(float, asked.factors.split(",")))
    times = ServerTimes(factors, asked.slow, asked.slo_tbt, asked.jitter, asked.router)
    for name in asked.workload or CASES:
        for load in map(float, asked.loads.split(",")):
            more = not asked.sessions, asked.before
            fleets = [
                played(name, load, asked.seconds, config, times, *more, number)
                for number in range(asked.plays)
            ]
            sys.stdout.write(_line(name, load, fleets))
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A Conductor whose instances are the replicas of a Serve deployment.

`ReplicaConductor` decides as for vLLM servers: each replica is a `VllmInstance`, which turns the
Conductor's commands into calls to send, and what routers see of the answers into reports.
`ReplicaConductor` reads no clock and waits for nothing: its driver passes the time, and takes the
decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from moonpool.conductor.actions import (
    ConductorAction,
    ConductorEvent,
    DeadlineMoved,
    InstanceJoined,
    InstanceLost,
    Refuse,
    Reported,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.conductor.conductor import Conductor
from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    AttemptId,
    CostMeasured,
    InstanceInfo,
    PrefillStarted,
    request_of,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.ray.replicas.calls import ReplicaCall
from moonpool.ray.replicas.settings import RouterSettings
from moonpool.refusal import Refusal
from moonpool.scheduler.actions import SendReport
from moonpool.types import (
    FinishReason,
    InstanceId,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Token,
    paying,
)
from moonpool.vllm.actions import (
    EngineOutput,
    EngineStepEnded,
    SubmitRequest,
    VllmAction,
    VllmEvent,
)
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.measure import ASSUMED_COST, FAR_BYTES_PER_S

STEP_S = 3e-3
"""Outputs of one replica that come within this time are of one step."""


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """The decision that a call goes to this replica."""

    call_id: str
    replica: str


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """The decision that a call is refused."""

    call_id: str
    refusal: Refusal


Decision = PlacedCall | RefusedCall


@dataclass(frozen=True, slots=True)
class Seen:
    """A router's observation of an answer at `now`: its number of tokens, or its end. `replica`:
    the replica that reports; "" means the replica that has the call."""

    call_id: str
    now: float
    num_tokens: int = 0
    has_ended: bool = False
    has_failed: bool = False
    replica: str = ""


@dataclass(slots=True)
class _Answer:
    num_prompt_tokens: int
    sent_s: float
    was_alone: bool
    cached_tokens: int = 0
    first_s: float | None = None
    num_tokens: int = 0


class ReplicaTimes:
    """The times of one replica, as routers measure them. Until there are enough samples, times are
    assumed. A prompt's time is a sample if nothing else ran on the replica during it, and a step's
    time if no prompt was computed during it. `tokens_came` returns the fitted cost, once."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        self._prefills: list[PrefillSample] = []
        self._decodes: list[DecodeSample] = []
        self._is_fitted = False

    def began(self, call_id: str, num_tokens: int, now: float) -> None:
        """Notes that the call is sent."""
        for other in self._answers.values():
            other.was_alone = False
        alone = not self._answers
        self._answers[call_id] = _Answer(num_tokens, now, alone)

    def starts(self, call_id: str, cached_tokens: int) -> None:
        """Notes that the replica computes the prompt now, except for the cached tokens."""
        if call_id in self._answers:
            self._answers[call_id].cached_tokens = cached_tokens

    def ended(self, call_id: str) -> None:
        self._answers.pop(call_id, None)

    def tokens_came(self, call_id: str, num_tokens: int, now: float) -> FittedCost | None:
        answer = self._answers.get(call_id)
        if answer is None or self._is_fitted:
            return None
        if answer.first_s is None:
            answer.first_s, answer.num_tokens = now, num_tokens
            if answer.was_alone and len(self._prefills) < MOST:
                self._prefills.append(
                    PrefillSample(
                        num_tokens=answer.num_prompt_tokens,
                        cached_tokens=min(answer.cached_tokens, answer.num_prompt_tokens - 1),
                        seconds=now - answer.sent_s,
                    )
                )
        else:
            answer.num_tokens += num_tokens
            self._note_steps(answer, now)
        return self._fit()

    def _note_steps(self, answer: _Answer, now: float) -> None:
        assert answer.first_s is not None
        is_sample = answer.num_tokens == LEAST_TOKENS and len(self._decodes) < MOST
        decoding = [each for each in self._answers.values() if each.first_s is not None]
        if not is_sample or len(decoding) < len(self._answers) or now <= answer.first_s:
            return
        context = sum(each.num_prompt_tokens + each.num_tokens for each in decoding)
        seconds = (now - answer.first_s) / (answer.num_tokens - 1)
        self._decodes.append(
            DecodeSample(batch=len(decoding), context_tokens=context, seconds=seconds)
        )

    def _fit(self) -> FittedCost | None:
        if min(len(self._prefills), len(self._decodes)) < ENOUGH:
            return None
        self._is_fitted = True
        return replace(
            fit_cost(self._prefills, self._decodes),
            shared_memory_bytes_per_s=FAR_BYTES_PER_S,
            network_bytes_per_s=FAR_BYTES_PER_S,
        )


@dataclass(slots=True)
class _Replica:
    name: str
    instance: VllmInstance
    times: ReplicaTimes = field(default_factory=ReplicaTimes)
    step_s: float | None = None  # the time at which the step under way began
    in_step: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _UnderWay:
    call: ReplicaCall
    deadline_s: float
    seen_s: float = 0.0  # the time at which the call was sent, or its last tokens came
    attempt_id: AttemptId | None = None
    replica: str = ""
    num_tokens: int = 0


class ReplicaConductor:
    """The state. The times passed to a `ReplicaConductor` must not decrease."""

    def __init__(self, settings: RouterSettings, incarnation: str = "") -> None:
        """`incarnation`: as for `Conductor`."""
        self._settings = settings
        self.conductor = Conductor(settings.conductor, incarnation, settings.slo)
        self._replicas: dict[str, _Replica] = {}
        self._calls: dict[str, _UnderWay] = {}
        self._decisions: list[Decision] = []
        self._incarnation = 0
        self._now = 0.0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def take_decisions(self) -> list[Decision]:
        """Returns the decisions since the last call."""
        found, self._decisions = self._decisions, []
        return found

    # Replicas

    def set_replicas(self, names: Iterable[str], now: float) -> None:
        """Sets the replicas that can be called; no others can."""
        wanted = set(names)
        for name in [name for name in self._replicas if name not in wanted]:
            self._lose(name, now)
        for name in sorted(wanted.difference(self._replicas)):
            self._join(name, now)

    def _join(self, name: str, now: float) -> None:
        settings = self._settings
        layout = BlockLayout(
            model_fingerprint="serve",
            dtype="bfloat16",
            block_tokens=settings.block_tokens,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            inner="serve",
        )
        num_blocks = settings.kv_tokens // settings.block_tokens
        self._replicas[name] = _Replica(
            name, VllmInstance(layout, num_blocks, Role.MIXED, publishes_events=False)
        )
        self._incarnation += 1
        own = InstanceId(name)
        info = InstanceInfo(
            instance_id=own,
            role=Role.MIXED,
            incarnation=self._incarnation,
            address=PeerAddress(instance_id=own, host_id="", unix_name="", tcp_host="", tcp_port=0),
            layout=layout,
            num_blocks=num_blocks,
            cost=ASSUMED_COST,
            pid=0,
            host="",
            largest_blocks=min(-(-settings.max_model_tokens // settings.block_tokens), num_blocks),
            context_tokens=settings.max_model_tokens,
        )
        self._post(InstanceJoined(info), now)

    def _lose(self, name: str, now: float) -> None:
        """Removes a replica. Calls that have had tokens from the replica are over, and their
        clients may send them again. The replica's other calls are placed again."""
        for call_id in [id_ for id_, each in self._calls.items() if each.replica == name]:
            if self._calls[call_id].num_tokens:
                self._cancel(call_id, now)
        del self._replicas[name]
        self._post(InstanceLost(InstanceId(name), "Serve has it no more"), now)

    # Calls

    def arrive(self, call: ReplicaCall, now: float) -> None:
        """Places a call, which may come again because its replica did not take it."""
        self._cancel(call.call_id, now)
        settings = self._settings
        tokens = call.token_ids[: settings.max_model_tokens - 1]
        most = max(settings.max_model_tokens - len(tokens), 1)
        request = Request(
            request_id=RequestId(call.call_id),
            token_ids=tokens,
            sampling=SamplingParams(
                max_tokens=min(call.max_tokens or settings.default_max_tokens, most)
            ),
            slo=settings.slo,
            arrived_s=now,
            deadline_s=now + settings.timeout_s,
            # Models share no blocks. An adapter would exclude replicas that have not loaded it.
            tenant=paying("", call.model),
            forwarded=True,
            program=call.program,
        )
        self._calls[call.call_id] = _UnderWay(call, request.deadline_s)
        self._post(RequestArrived(request), now)

    def see(self, seen: Sequence[Seen]) -> None:
        """Takes what routers have seen, in the order of time."""
        for each in seen:
            under_way = self._calls.get(each.call_id)
            now = max(each.now, self._now)
            if each.has_failed and not each.replica:  # its router does not want it any more
                self._cancel(each.call_id, now)
                continue
            if under_way is None or under_way.attempt_id is None:
                continue
            if each.replica not in ("", under_way.replica):
                continue  # this belongs to an earlier try, which that replica did not take
            if each.num_tokens:
                self._see_tokens(under_way, each.num_tokens, now)
            if each.has_failed:
                self._cancel(each.call_id, now)
            elif each.has_ended:
                self._finish(under_way, now)
        for replica in self._replicas.values():
            self._end_step(replica)

    def tick(self, now: float) -> None:
        for call_id, under_way in list(self._calls.items()):
            latest_s = under_way.seen_s + self._settings.timeout_s
            if under_way.deadline_s <= now < latest_s:  # the replica still computes the call
                under_way.deadline_s = latest_s
                self._post(DeadlineMoved(RequestId(call_id), latest_s), now)
        self._post(Tick(), now)

    def _see_tokens(self, under_way: _UnderWay, num_tokens: int, now: float) -> None:
        replica = self._replicas.get(under_way.replica)
        if replica is None or under_way.attempt_id is None:
            return
        call_id = under_way.call.call_id
        began_s = replica.step_s
        if began_s is not None and (now - began_s > STEP_S or call_id in replica.in_step):
            self._end_step(replica)
        if replica.step_s is None:
            replica.step_s = now
        replica.in_step.add(call_id)
        cost = replica.times.tokens_came(call_id, num_tokens, now)
        under_way.num_tokens += num_tokens
        under_way.seen_s = now
        output = EngineOutput(under_way.attempt_id, (Token(0),) * num_tokens)
        self._give(replica, output, now)
        if cost is not None:
            self._learn(replica, cost, now)

    def _end_step(self, replica: _Replica) -> None:
        if replica.step_s is not None:
            began_s, replica.step_s = replica.step_s, None
            replica.in_step.clear()
            self._give(replica, EngineStepEnded(), max(began_s, self._now))

    def _finish(self, under_way: _UnderWay, now: float) -> None:
        """Notes that the answer is complete."""
        call_id, replica = under_way.call.call_id, self._replicas.get(under_way.replica)
        # without streaming, all tokens arrive together, and their number is unknown
        if not under_way.num_tokens:
            self._see_tokens(under_way, 1, now)
        if replica is not None:
            self._end_step(replica)
            replica.times.ended(call_id)
        if self._calls.pop(call_id, None) is not None:
            num_tokens = under_way.num_tokens
            self._post(RequestFinished(RequestId(call_id), FinishReason.STOP, num_tokens), now)

    def _cancel(self, call_id: str, now: float) -> None:
        if self._forget(call_id):
            self._post(RequestCancelled(RequestId(call_id)), now)

    def _forget(self, call_id: str) -> bool:
        """Returns whether the call was under way."""
        under_way = self._calls.pop(call_id, None)
        if under_way is not None and under_way.replica in self._replicas:
            self._replicas[under_way.replica].times.ended(call_id)
        return under_way is not None

    def _learn(self, replica: _Replica, cost: FittedCost, now: float) -> None:
        known = CostMeasured(cost=cost)
        self._post(Reported(InstanceId(replica.name), known), now)

    # Events in, actions out

    def _post(self, event: ConductorEvent, now: float) -> None:
        self._now = max(now, self._now)
        for action in self.conductor.handle(event, self._now):
            self._perform(action)

    def _give(self, replica: _Replica, event: VllmEvent, now: float) -> None:
        self._now = max(now, self._now)
        for action in replica.instance.handle(event, self._now):
            self._perform_of(replica, action)

    def _perform(self, action: ConductorAction) -> None:
        match action:
            case Send():
                replica = self._replicas.get(action.instance_id)
                if replica is not None:
                    self._give(replica, action.command, self._now)
            case Refuse():
                self._forget(action.request_id)
                self._decisions.append(RefusedCall(action.request_id, action.refusal))
            case _:
                # tokens go from the replica to the client, and all other actions are for an
                # operator's log
                pass

    def _perform_of(self, replica: _Replica, action: VllmAction) -> None:
        match action:
            case SubmitRequest():
                self._submit(replica, action)
            case SendReport():
                if isinstance(action.report, PrefillStarted):
                    call_id = request_of(action.report.attempt_id)
                    replica.times.starts(call_id, action.report.cached_tokens)
                self._post(Reported(InstanceId(replica.name), action.report), self._now)
            case _:
                pass  # routers see steps and ends without this report

    def _submit(self, replica: _Replica, submit: SubmitRequest) -> None:
        call_id = request_of(submit.attempt.attempt_id)
        under_way = self._calls.get(call_id)
        if under_way is None:
            return
        under_way.attempt_id, under_way.replica = submit.attempt.attempt_id, replica.name
        under_way.seen_s = self._now
        replica.times.began(call_id, len(submit.attempt.token_ids), self._now)
        self._decisions.append(PlacedCall(call_id, replica.name))


ENOUGH = 6
"""Samples of each kind that the first fit needs. Further ones correct it by factors, as everywhere.
"""
MOST = 64
LEAST_TOKENS = 8
"""Tokens of an answer from which its mean step is a sample."""

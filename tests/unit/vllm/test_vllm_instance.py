"""Tests an instance whose engine is another project's server: its requests to the server, and its
reports to the head."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    ForwardedCall,
    HotPrefixes,
    LeaveCluster,
    ListHot,
    PrefillDone,
    PrefillStarted,
    PrefixTakenOver,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StepTokens,
    SwitchRole,
    TakeOverPrefix,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import BlockKey, FinishReason, InstanceId, Role, SamplingParams, Slo, Token
from moonpool.vllm import instance
from moonpool.vllm.actions import (
    CacheEventsReceived,
    CancelRequest,
    EngineOutput,
    EngineStepEnded,
    FlushStep,
    PrefixesCounted,
    SubmitFailed,
    SubmitRequest,
    TimePassed,
    VllmAction,
    VllmEvent,
)
from moonpool.vllm.block_names import ExternalBlocksRemoved, ExternalBlocksStored
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.known_cache import PrefixCounts

LAYOUT = BlockLayout(
    model_fingerprint="vllm m",
    dtype="bfloat16",
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
PROMPT = tuple(range(10, 22))  # three blocks
TARGET = PeerAddress(instance_id=InstanceId("d"), host_id="", unix_name="", tcp_host="", tcp_port=0)
T = TypeVar("T")


def work(
    name: str, tokens: tuple[int, ...] = PROMPT, max_tokens: int = 8, **others: object
) -> AttemptSpec:
    values: dict[str, object] = {
        "attempt_id": AttemptId(name),
        "token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "sampling": SamplingParams(max_tokens=max_tokens),
        "slo": Slo(ttft_s=1.0, tbt_s=1.0),
        "tenant": "",
        "use_cache": True,
        "timeout_s": 10.0,
    }
    return AttemptSpec(**(values | others))  # type: ignore[arg-type]


def keys(tokens: tuple[int, ...] = PROMPT, tenant: str = "") -> tuple[BlockKey, ...]:
    return tuple(block_keys(tokens, 4, root_key(LAYOUT.fingerprint, tenant)))


def piece(
    name: str, *tokens: int, finish: FinishReason | None = None, handle: bytes = b""
) -> EngineOutput:
    return EngineOutput(AttemptId(name), tuple(Token(token_id=t) for t in tokens), finish, handle)


class Bench:
    """Holds an instance, its last answers, and a clock."""

    def __init__(
        self, role: Role = Role.MIXED, publishes_events: bool = False, context_tokens: int = 0
    ) -> None:
        self.instance = VllmInstance(
            LAYOUT, 64, role, publishes_events, context_tokens=context_tokens
        )
        self.now = 0.0

    def handle(self, *events: VllmEvent) -> list[VllmAction]:
        return [action for event in events for action in self.instance.handle(event, self.now)]

    def step(self, *pieces: EngineOutput, after_s: float = 0.1) -> list[VllmAction]:
        """Ends a step in which all these outputs come."""
        self.now += after_s
        return self.handle(*pieces, EngineStepEnded())


def told(actions: list[VllmAction], kind: type[T]) -> list[T]:
    return [a.report for a in actions if isinstance(a, SendReport) and isinstance(a.report, kind)]


def of_kind(actions: list[VllmAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def test_an_answer_from_begin_to_end() -> None:
    bench = Bench()
    begun = bench.handle(StartPrefill(attempt=work("a", max_tokens=3)))
    (ask,) = of_kind(begun, SubmitRequest)
    assert ask.attempt.attempt_id == "a"
    assert not ask.hands_over
    assert told(begun, PrefillStarted)[0].cached_tokens == 0
    steps = [
        *told(bench.step(piece("a", 1)), StepTokens),
        *told(bench.step(piece("a", 2)), StepTokens),
        *told(bench.step(piece("a", 3, finish=FinishReason.LENGTH)), StepTokens),
    ]
    assert [t.token_id for s in steps for w in s.attempts for t in w.tokens] == [1, 2, 3]
    assert steps[-1].attempts[0].finish is FinishReason.LENGTH
    assert bench.instance.load().held_blocks == 0


def outgrowing(max_tokens: int) -> list[VllmAction]:
    """Returns the actions of an instance with 14 tokens of context after a prompt of 12 tokens and
    two tokens of its answer, of which the second is the last that fits."""
    bench = Bench(context_tokens=14)
    bench.handle(StartPrefill(attempt=work("a", max_tokens=max_tokens)))
    bench.step(piece("a", 1))
    return bench.step(piece("a", 2, finish=FinishReason.LENGTH))


def test_an_answer_that_outgrows_the_context_is_given_back_after_its_tokens() -> None:
    actions = outgrowing(max_tokens=5)
    (step,) = told(actions, StepTokens)
    assert [t.token_id for t in step.attempts[0].tokens] == [2]
    assert step.attempts[0].finish is None
    (failed,) = told(actions, AttemptFailed)
    assert failed.reason == "no_blocks" and "14 tokens" in failed.message
    reports = [a.report for a in actions if isinstance(a, SendReport)]
    assert reports.index(step) < reports.index(failed)


def test_an_answer_that_ends_with_the_context_by_its_own_limit_ends() -> None:
    actions = outgrowing(max_tokens=2)
    assert told(actions, StepTokens)[0].attempts[0].finish is FinishReason.LENGTH
    assert not told(actions, AttemptFailed)


def test_what_comes_together_is_one_step_and_its_time_is_told_where_all_decode() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a")), StartPrefill(attempt=work("b")))
    assert told(bench.step(piece("a", 1), piece("b", 1)), StepTokens)[0].gap_s == 0.0
    (step,) = told(bench.step(piece("a", 2), piece("b", 2), after_s=0.25), StepTokens)
    assert len(step.attempts) == 2
    assert step.gap_s == pytest.approx(0.25)
    (step,) = told(bench.step(piece("a", 3), after_s=0.1), StepTokens)
    assert step.gap_s == 0.0  # "b" had no token: this step did not have them all
    bench.handle(StartPrefill(attempt=work("c")))
    (step,) = told(bench.step(piece("a", 4), piece("b", 3)), StepTokens)
    assert step.gap_s == 0.0  # 0, because a prompt was computed in the same step
    (step,) = told(bench.step(piece("a", 5), piece("b", 4), piece("c", 1)), StepTokens)
    assert step.gap_s == 0.0  # 0, because an answer ended in this step
    (step,) = told(bench.step(piece("a", 6), piece("b", 5), piece("c", 2)), StepTokens)
    assert step.gap_s == pytest.approx(0.1)


def test_an_end_of_step_is_asked_for_once() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a")), StartPrefill(attempt=work("b")))
    assert len(of_kind(bench.handle(piece("a", 1), piece("b", 1)), FlushStep)) == 1
    bench.handle(EngineStepEnded())
    assert not bench.handle(EngineStepEnded())


def test_prompts_begin_one_after_the_other_as_far_as_can_be_seen() -> None:
    bench = Bench()
    assert told(bench.handle(StartPrefill(attempt=work("a"))), PrefillStarted)
    assert not told(bench.handle(StartPrefill(attempt=work("b"))), PrefillStarted)
    assert not told(bench.handle(StartPrefill(attempt=work("c"))), PrefillStarted)
    begun = told(bench.handle(piece("a", 1)), PrefillStarted)
    assert [report.attempt_id for report in begun] == ["b"]
    # "c" overtakes "b": so "b" began at the latest now, and is not announced twice.
    assert [r.attempt_id for r in told(bench.handle(piece("c", 1)), PrefillStarted)] == ["c"]
    assert not told(bench.handle(piece("b", 1)), PrefillStarted)


def test_who_is_given_up_lets_the_next_begin_and_is_not_told_of() -> None:
    bench = Bench()
    for name in "abc":
        bench.handle(StartPrefill(attempt=work(name)))
    assert not told(bench.handle(Abort(attempt_id=AttemptId("b"))), PrefillStarted)
    ended = bench.handle(Abort(attempt_id=AttemptId("a")))
    assert of_kind(ended, CancelRequest) == [CancelRequest(AttemptId("a"))]
    assert [report.attempt_id for report in told(ended, PrefillStarted)] == ["c"]
    assert not bench.handle(piece("a", 1), Abort(attempt_id=AttemptId("a")))


def test_what_it_computed_is_assumed_to_be_there_and_is_a_hit() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a", max_tokens=5)))
    (change,) = told(bench.step(piece("a", 1)), BlocksChanged)
    assert set(change.stored) == set(keys())
    bench.step(piece("a", 2), piece("a", 3), piece("a", 4))
    (change,) = told(bench.step(piece("a", 5, finish=FinishReason.LENGTH)), BlocksChanged)
    answer = (*PROMPT, 1, 2, 3, 4, 5)
    assert set(change.stored) == set(keys(answer)) - set(keys())
    (started,) = told(bench.handle(StartPrefill(attempt=work("b", answer))), PrefillStarted)
    assert started.cached_tokens == 16


def test_a_forwarded_call_tells_what_is_cached_and_counts_where_its_tokens_are_known() -> None:
    for is_exact in (True, False):
        bench = Bench(publishes_events=True)
        called = ForwardedCall(path="/v1/chat/completions", body=b"{}", is_exact=is_exact)
        for name, cached in (("a", 0), ("b", 8), ("c", 8), ("d", 8)):
            actions = bench.handle(StartPrefill(attempt=work(name, call=called)))
            (started,) = told(actions, PrefillStarted)
            assert (started.cached_tokens, started.early) == (cached, True)
            bench.handle(piece(name, 0), piece(name, finish=FinishReason.STOP), EngineStepEnded())
            bench.now += 3.0
            bench.handle(TimePassed())
        view = bench.instance.load().cache_view
        assert view is not None
        assert (view.prompt_tokens, view.expected_tokens) == ((48, 24) if is_exact else (0, 0))
        assert view.source == ("distrusted" if is_exact else "assumed"), "events that never came"


def test_calls_whose_first_token_is_seen_begin_one_after_the_other() -> None:
    bench = Bench()
    seen = ForwardedCall(path="/v1/completions", body=b"", is_exact=True, tells_first_token=True)
    (started,) = told(bench.handle(StartPrefill(attempt=work("a", call=seen))), PrefillStarted)
    assert not started.early, "it is a sample of the server's times"
    assert not told(bench.handle(StartPrefill(attempt=work("b", call=seen))), PrefillStarted)
    begun = told(bench.handle(piece("a", 0)), PrefillStarted)
    assert [report.attempt_id for report in begun] == ["b"]


def test_blocks_of_attempts_beyond_those_shown_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "SHOWN_OWNERS", 2)
    bench = Bench()
    for name in "abcd":
        bench.handle(StartPrefill(attempt=work(name)))
    load = bench.instance.load()
    assert len(load.owners) == 2
    assert load.held_blocks == 2 * sum(load.owners.values())
    assert load.free_blocks == load.num_blocks - load.held_blocks


def test_a_whole_prompt_is_never_a_hit() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a")))
    bench.step(piece("a", 1, finish=FinishReason.STOP))
    (started,) = told(bench.handle(StartPrefill(attempt=work("b"))), PrefillStarted)
    assert started.cached_tokens == 8


def test_who_wants_no_cache_neither_finds_nor_leaves_anything() -> None:
    bench = Bench()
    alone = work("a", use_cache=False)
    bench.handle(StartPrefill(attempt=alone))
    assert not told(bench.step(piece("a", 1, finish=FinishReason.STOP)), BlocksChanged)


def test_what_the_engine_says_of_its_cache_is_passed_on_under_our_names() -> None:
    bench = Bench(publishes_events=True)
    heard = ExternalBlocksStored(hashes=(7, 8, 9), parent=None, token_ids=PROMPT, medium="GPU")
    (change,) = told(bench.handle(CacheEventsReceived((heard,))), BlocksChanged)
    assert change.stored == keys()
    (started,) = told(bench.handle(StartPrefill(attempt=work("a"))), PrefillStarted)
    assert started.cached_tokens == 8
    # no change, because only the server's own events count
    assert not told(bench.step(piece("a", 1)), BlocksChanged)
    gone = ExternalBlocksRemoved(hashes=(9,), medium="GPU")
    (change,) = told(bench.handle(CacheEventsReceived((gone,))), BlocksChanged)
    assert change.removed == (keys()[2],)
    assert change.sequence == 1
    (snapshot,) = told(bench.handle(Resync()), BlocksSnapshot)
    assert (snapshot.keys, snapshot.next_sequence) == (keys()[:2], 2)


def test_where_words_were_lost_what_was_known_is_forgotten() -> None:
    bench = Bench(publishes_events=True)
    first = ExternalBlocksStored(hashes=(7,), parent=None, token_ids=PROMPT[:4], medium="GPU")
    bench.handle(CacheEventsReceived((first,)))
    (change,) = told(bench.handle(CacheEventsReceived((), lost=True)), BlocksChanged)
    assert change.removed == keys()[:1]
    assert bench.instance.counters["names_lost"] == 1


def test_a_prefill_instance_hands_its_kvcache_over() -> None:
    bench = Bench(Role.PREFILL)
    (ask,) = of_kind(bench.handle(StartPrefill(attempt=work("a"), target=TARGET)), SubmitRequest)
    assert ask.hands_over
    done = bench.handle(piece("a", 5, finish=FinishReason.LENGTH, handle=b"there"))
    (report,) = told(done, PrefillDone)
    assert (report.token.token_id, report.finish, report.handle) == (5, None, b"there")
    assert bench.instance.load().held_blocks == 0


def test_a_prefill_that_hands_nothing_over_is_no_prefill() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=work("a"), target=TARGET))
    ended = bench.handle(piece("a", 5, finish=FinishReason.LENGTH))
    assert "--kv-transfer-config" in told(ended, AttemptFailed)[0].message
    assert not told(ended, PrefillDone)


def test_an_answer_of_one_token_ends_where_it_was_prefilled() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=work("a"), target=TARGET))
    (report,) = told(bench.handle(piece("a", 5, finish=FinishReason.STOP)), PrefillDone)
    assert report.finish is FinishReason.STOP


def test_a_decode_instance_fetches_by_the_handle_and_goes_on_behind_the_first_token() -> None:
    bench = Bench(Role.DECODE)
    assert not bench.handle(ReserveDecode(attempt=work("a")))
    start = StartDecode(attempt_id=AttemptId("a"), token=Token(token_id=5), handle=b"there")
    (ask,) = of_kind(bench.handle(start), SubmitRequest)
    assert ask.handle == b"there"
    accepted = bench.handle(piece("a", 5))
    assert told(accepted, DecodeAccepted)
    assert not of_kind(accepted, FlushStep)  # no flush, because the head has that token already
    (step,) = told(bench.step(piece("a", 6)), StepTokens)
    assert [t.token_id for t in step.attempts[0].tokens] == [6]


def test_what_a_decode_instance_is_to_fetch_is_compared_with_what_it_fetched() -> None:
    bench = Bench(Role.DECODE)
    bench.handle(PrefixesCounted(PrefixCounts(100.0, 50.0, 7.0)))
    bench.handle(ReserveDecode(attempt=work("a")))
    bench.handle(StartDecode(attempt_id=AttemptId("a"), token=Token(token_id=5), handle=b"{}"))
    bench.handle(PrefixesCounted(PrefixCounts(112.0, 50.0, 15.0)))
    view = bench.instance.load().cache_view
    assert view is not None
    assert (view.prompt_tokens, view.expected_tokens) == (12, 8)
    assert (view.engine_queries, view.engine_hits) == (12, 8)


def test_another_first_token_than_the_prompts_is_never_an_answer() -> None:
    bench = Bench(Role.DECODE)
    bench.handle(ReserveDecode(attempt=work("a")))
    bench.handle(StartDecode(attempt_id=AttemptId("a"), token=Token(token_id=5)))
    ended = bench.handle(piece("a", 4))
    assert of_kind(ended, CancelRequest)
    assert "first token" in told(ended, AttemptFailed)[0].message
    assert not told(ended, DecodeAccepted)


def test_a_failed_work_is_told_once_and_frees_its_place() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a")), StartPrefill(attempt=work("b")))
    bench.handle(piece("a", 1))
    failed = bench.handle(SubmitFailed(AttemptId("a"), "it broke"))
    assert told(failed, AttemptFailed)[0].message == "it broke"
    assert not bench.handle(SubmitFailed(AttemptId("a"), "it broke"))
    assert not told(bench.handle(EngineStepEnded()), StepTokens)  # later events do not count


def test_what_it_cannot_do_it_says() -> None:
    bench = Bench()
    assert told(bench.handle(SwitchRole(role=Role.DECODE)), RoleChanged)[0].role is Role.MIXED
    assert told(bench.handle(ListHot(number=3, num_blocks=9)), HotPrefixes)[0].number == 3
    take = TakeOverPrefix(number=4, source=TARGET, keys=keys(), num_uses=1, timeout_s=1.0)
    assert told(bench.handle(take), PrefixTakenOver)[0].error
    assert of_kind(bench.handle(LeaveCluster()), ExitProcess)


def test_a_lost_head_ends_everything() -> None:
    bench = Bench()
    bench.handle(StartPrefill(attempt=work("a")), ReserveDecode(attempt=work("b")))
    assert bench.instance.abort_all() == [CancelRequest(AttemptId("a"))]
    assert bench.instance.load().owners == {}


class Guests(RuleBasedStateMachine):
    """Checks that sums are right and every attempt ends at most once, in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.open: dict[str, int] = {}
        self.ended: set[str] = set()
        self.started: set[str] = set()
        self.number = 0

    def look(self, actions: list[VllmAction]) -> None:
        for started in told(actions, PrefillStarted):
            assert started.attempt_id not in self.started
            self.started.add(started.attempt_id)
        for step in told(actions, StepTokens):
            for item in step.attempts:
                assert item.attempt_id in self.started
                if item.finish is not None:
                    self.end(item.attempt_id)
        for failed in told(actions, AttemptFailed):
            self.end(failed.attempt_id)

    def end(self, name: str) -> None:
        assert name not in self.ended
        self.ended.add(name)
        self.open.pop(name, None)

    @rule(tokens=st.integers(1, 20))
    def begin(self, tokens: int) -> None:
        name = f"w{self.number}"
        self.number += 1
        self.open[name] = 0
        self.look(self.bench.handle(StartPrefill(attempt=work(name, tuple(range(tokens))))))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ends=st.booleans())
    def speak(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.open[name] += 1
        finish = FinishReason.LENGTH if ends else None
        self.look(self.bench.handle(piece(name, 1, finish=finish)))
        if ends:
            self.look(self.bench.handle(EngineStepEnded()))
            assert name in self.ended

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def break_off(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        event = SubmitFailed(AttemptId(name), "x") if fails else Abort(attempt_id=AttemptId(name))
        self.look(self.bench.handle(event))
        if not fails:
            self.end(name)

    @rule()
    def step_ends(self) -> None:
        self.bench.now += 0.1
        self.look(self.bench.handle(EngineStepEnded()))

    @invariant()
    def balances(self) -> None:
        load = self.bench.instance.load()
        assert load.held_blocks + load.free_blocks == load.num_blocks
        assert sum(load.owners.values()) >= load.held_blocks
        assert set(load.owners) == {f"work:{name}" for name in self.open}
        # The first request in line has begun, because the server always computes some request.
        if load.num_waiting:
            assert any(name in self.started for name in self.open)


Guests.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGuests = Guests.TestCase

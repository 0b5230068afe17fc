"""An instance whose engine is somebody else's: what it asks, and what it tells the head."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.kvcache.foreign import ForeignRemoved, ForeignStored
from moonpool.kvcache.hashing import block_keys, root_key
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import BlockKey, FinishReason, InstanceId, Role, SamplingParams, Slo, Token
from moonpool.workers.actions import Depart, Tell
from moonpool.workers.guest import (
    Ask,
    AskFailed,
    EndStepSoon,
    GiveUp,
    GuestAction,
    GuestEvent,
    GuestInstance,
    NamesTold,
    Piece,
    StepOver,
)
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    HotPrefixes,
    Leave,
    ListHot,
    PrefillDone,
    PrefillStarted,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StepTokens,
    SwitchRole,
    TakenOver,
    TakeOver,
    Work,
    WorkFailed,
    WorkId,
)

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
) -> Work:
    values: dict[str, object] = {
        "work_id": WorkId(name),
        "token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "sampling": SamplingParams(max_tokens=max_tokens),
        "slo": Slo(ttft_s=1.0, tbt_s=1.0),
        "tenant": "",
        "use_cache": True,
        "timeout_s": 10.0,
    }
    return Work(**(values | others))  # type: ignore[arg-type]


def keys(tokens: tuple[int, ...] = PROMPT, tenant: str = "") -> tuple[BlockKey, ...]:
    return tuple(block_keys(tokens, 4, root_key(LAYOUT.fingerprint, tenant)))


def piece(
    name: str, *tokens: int, finish: FinishReason | None = None, handle: bytes = b""
) -> Piece:
    return Piece(WorkId(name), tuple(Token(token_id=t) for t in tokens), finish, handle)


class Bench:
    """An instance, what it was last answered, and a clock."""

    def __init__(self, role: Role = Role.MIXED, tells_names: bool = False) -> None:
        self.guest = GuestInstance(LAYOUT, 64, role, tells_names)
        self.now = 0.0

    def handle(self, *events: GuestEvent) -> list[GuestAction]:
        return [action for event in events for action in self.guest.handle(event, self.now)]

    def step(self, *pieces: Piece, after_s: float = 0.1) -> list[GuestAction]:
        """They come together."""
        self.now += after_s
        return self.handle(*pieces, StepOver())


def told(actions: list[GuestAction], kind: type[T]) -> list[T]:
    return [a.report for a in actions if isinstance(a, Tell) and isinstance(a.report, kind)]


def of_kind(actions: list[GuestAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def test_an_answer_from_begin_to_end() -> None:
    bench = Bench()
    begun = bench.handle(StartPrefill(work=work("a", max_tokens=3)))
    (ask,) = of_kind(begun, Ask)
    assert ask.work.work_id == "a"
    assert not ask.hands_over
    assert told(begun, PrefillStarted)[0].cached_tokens == 0
    steps = [
        *told(bench.step(piece("a", 1)), StepTokens),
        *told(bench.step(piece("a", 2)), StepTokens),
        *told(bench.step(piece("a", 3, finish=FinishReason.LENGTH)), StepTokens),
    ]
    assert [t.token_id for s in steps for w in s.works for t in w.tokens] == [1, 2, 3]
    assert steps[-1].works[0].finish is FinishReason.LENGTH
    assert bench.guest.load().held_blocks == 0


def test_what_comes_together_is_one_step_and_its_time_is_told_where_all_decode() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a")), StartPrefill(work=work("b")))
    assert told(bench.step(piece("a", 1), piece("b", 1)), StepTokens)[0].gap_s == 0.0
    (step,) = told(bench.step(piece("a", 2), piece("b", 2), after_s=0.25), StepTokens)
    assert len(step.works) == 2
    assert step.gap_s == pytest.approx(0.25)
    (step,) = told(bench.step(piece("a", 3), after_s=0.1), StepTokens)
    assert step.gap_s == 0.0  # "b" had no token: this was no step of them all
    bench.handle(StartPrefill(work=work("c")))
    (step,) = told(bench.step(piece("a", 4), piece("b", 3)), StepTokens)
    assert step.gap_s == 0.0  # a prompt is being computed beside them
    (step,) = told(bench.step(piece("a", 5), piece("b", 4), piece("c", 1)), StepTokens)
    assert step.gap_s == 0.0  # it ended in this step
    (step,) = told(bench.step(piece("a", 6), piece("b", 5), piece("c", 2)), StepTokens)
    assert step.gap_s == pytest.approx(0.1)


def test_an_end_of_step_is_asked_for_once() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a")), StartPrefill(work=work("b")))
    assert len(of_kind(bench.handle(piece("a", 1), piece("b", 1)), EndStepSoon)) == 1
    bench.handle(StepOver())
    assert not bench.handle(StepOver())


def test_prompts_begin_one_after_the_other_as_far_as_can_be_seen() -> None:
    bench = Bench()
    assert told(bench.handle(StartPrefill(work=work("a"))), PrefillStarted)
    assert not told(bench.handle(StartPrefill(work=work("b"))), PrefillStarted)
    assert not told(bench.handle(StartPrefill(work=work("c"))), PrefillStarted)
    begun = told(bench.handle(piece("a", 1)), PrefillStarted)
    assert [report.work_id for report in begun] == ["b"]
    # "c" overtakes "b": it began at the latest now, and "b" is not told twice.
    assert [r.work_id for r in told(bench.handle(piece("c", 1)), PrefillStarted)] == ["c"]
    assert not told(bench.handle(piece("b", 1)), PrefillStarted)


def test_who_is_given_up_lets_the_next_begin_and_is_not_told_of() -> None:
    bench = Bench()
    for name in "abc":
        bench.handle(StartPrefill(work=work(name)))
    assert not told(bench.handle(Abort(work_id=WorkId("b"))), PrefillStarted)
    ended = bench.handle(Abort(work_id=WorkId("a")))
    assert of_kind(ended, GiveUp) == [GiveUp(WorkId("a"))]
    assert [report.work_id for report in told(ended, PrefillStarted)] == ["c"]
    assert not bench.handle(piece("a", 1), Abort(work_id=WorkId("a")))


def test_what_it_computed_is_assumed_to_be_there_and_is_a_hit() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a", max_tokens=5)))
    (change,) = told(bench.step(piece("a", 1)), BlocksChanged)
    assert set(change.stored) == set(keys())
    bench.step(piece("a", 2), piece("a", 3), piece("a", 4))
    (change,) = told(bench.step(piece("a", 5, finish=FinishReason.LENGTH)), BlocksChanged)
    answer = (*PROMPT, 1, 2, 3, 4, 5)
    assert set(change.stored) == set(keys(answer)) - set(keys())
    (started,) = told(bench.handle(StartPrefill(work=work("b", answer))), PrefillStarted)
    assert started.cached_tokens == 16


def test_a_whole_prompt_is_never_a_hit() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a")))
    bench.step(piece("a", 1, finish=FinishReason.STOP))
    (started,) = told(bench.handle(StartPrefill(work=work("b"))), PrefillStarted)
    assert started.cached_tokens == 8


def test_who_wants_no_cache_neither_finds_nor_leaves_anything() -> None:
    bench = Bench()
    alone = work("a", use_cache=False)
    bench.handle(StartPrefill(work=alone))
    assert not told(bench.step(piece("a", 1, finish=FinishReason.STOP)), BlocksChanged)


def test_what_the_engine_says_of_its_cache_is_passed_on_under_our_names() -> None:
    bench = Bench(tells_names=True)
    heard = ForeignStored(hashes=(7, 8, 9), parent=None, token_ids=PROMPT, medium="GPU")
    (change,) = told(bench.handle(NamesTold((heard,))), BlocksChanged)
    assert change.stored == keys()
    (started,) = told(bench.handle(StartPrefill(work=work("a"))), PrefillStarted)
    assert started.cached_tokens == 8
    assert not told(bench.step(piece("a", 1)), BlocksChanged)  # only its own word counts
    gone = ForeignRemoved(hashes=(9,), medium="GPU")
    (change,) = told(bench.handle(NamesTold((gone,))), BlocksChanged)
    assert change.removed == (keys()[2],)
    assert change.sequence == 1
    (snapshot,) = told(bench.handle(Resync()), BlocksSnapshot)
    assert (snapshot.keys, snapshot.next_sequence) == (keys()[:2], 2)


def test_where_words_were_lost_what_was_known_is_forgotten() -> None:
    bench = Bench(tells_names=True)
    first = ForeignStored(hashes=(7,), parent=None, token_ids=PROMPT[:4], medium="GPU")
    bench.handle(NamesTold((first,)))
    (change,) = told(bench.handle(NamesTold((), anew=True)), BlocksChanged)
    assert change.removed == keys()[:1]
    assert bench.guest.counters["names_lost"] == 1


def test_a_prefill_instance_hands_its_kvcache_over() -> None:
    bench = Bench(Role.PREFILL)
    (ask,) = of_kind(bench.handle(StartPrefill(work=work("a"), target=TARGET)), Ask)
    assert ask.hands_over
    done = bench.handle(piece("a", 5, finish=FinishReason.LENGTH, handle=b"there"))
    (report,) = told(done, PrefillDone)
    assert (report.token.token_id, report.finish, report.handle) == (5, None, b"there")
    assert bench.guest.load().held_blocks == 0


def test_a_prefill_that_hands_nothing_over_is_no_prefill() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(work=work("a"), target=TARGET))
    ended = bench.handle(piece("a", 5, finish=FinishReason.LENGTH))
    assert "--kv-transfer-config" in told(ended, WorkFailed)[0].message
    assert not told(ended, PrefillDone)


def test_an_answer_of_one_token_ends_where_it_was_prefilled() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(work=work("a"), target=TARGET))
    (report,) = told(bench.handle(piece("a", 5, finish=FinishReason.STOP)), PrefillDone)
    assert report.finish is FinishReason.STOP


def test_a_decode_instance_fetches_by_the_handle_and_goes_on_behind_the_first_token() -> None:
    bench = Bench(Role.DECODE)
    assert not bench.handle(ReserveDecode(work=work("a")))
    start = StartDecode(work_id=WorkId("a"), token=Token(token_id=5), handle=b"there")
    (ask,) = of_kind(bench.handle(start), Ask)
    assert ask.handle == b"there"
    accepted = bench.handle(piece("a", 5))
    assert told(accepted, DecodeAccepted)
    assert not of_kind(accepted, EndStepSoon)  # the head has that token already
    (step,) = told(bench.step(piece("a", 6)), StepTokens)
    assert [t.token_id for t in step.works[0].tokens] == [6]


def test_another_first_token_than_the_prompts_is_never_an_answer() -> None:
    bench = Bench(Role.DECODE)
    bench.handle(ReserveDecode(work=work("a")))
    bench.handle(StartDecode(work_id=WorkId("a"), token=Token(token_id=5)))
    ended = bench.handle(piece("a", 4))
    assert of_kind(ended, GiveUp)
    assert "first token" in told(ended, WorkFailed)[0].message
    assert not told(ended, DecodeAccepted)


def test_a_failed_work_is_told_once_and_frees_its_place() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a")), StartPrefill(work=work("b")))
    bench.handle(piece("a", 1))
    failed = bench.handle(AskFailed(WorkId("a"), "it broke"))
    assert told(failed, WorkFailed)[0].message == "it broke"
    assert not bench.handle(AskFailed(WorkId("a"), "it broke"))
    assert not told(bench.handle(StepOver()), StepTokens)  # nothing of it comes afterwards


def test_what_it_cannot_do_it_says() -> None:
    bench = Bench()
    assert told(bench.handle(SwitchRole(role=Role.DECODE)), RoleChanged)[0].role is Role.MIXED
    assert told(bench.handle(ListHot(number=3, num_blocks=9)), HotPrefixes)[0].number == 3
    take = TakeOver(number=4, source=TARGET, keys=keys(), num_uses=1, timeout_s=1.0)
    assert told(bench.handle(take), TakenOver)[0].error
    assert of_kind(bench.handle(Leave()), Depart)


def test_a_lost_head_ends_everything() -> None:
    bench = Bench()
    bench.handle(StartPrefill(work=work("a")), ReserveDecode(work=work("b")))
    assert bench.guest.abort_all() == [GiveUp(WorkId("a"))]
    assert bench.guest.load().owners == {}


class Guests(RuleBasedStateMachine):
    """Whatever comes in whatever order, sums balance and every work ends at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.open: dict[str, int] = {}
        self.ended: set[str] = set()
        self.started: set[str] = set()
        self.number = 0

    def look(self, actions: list[GuestAction]) -> None:
        for started in told(actions, PrefillStarted):
            assert started.work_id not in self.started
            self.started.add(started.work_id)
        for step in told(actions, StepTokens):
            for item in step.works:
                assert item.work_id in self.started
                if item.finish is not None:
                    self.end(item.work_id)
        for failed in told(actions, WorkFailed):
            self.end(failed.work_id)

    def end(self, name: str) -> None:
        assert name not in self.ended
        self.ended.add(name)
        self.open.pop(name, None)

    @rule(tokens=st.integers(1, 20))
    def begin(self, tokens: int) -> None:
        name = f"w{self.number}"
        self.number += 1
        self.open[name] = 0
        self.look(self.bench.handle(StartPrefill(work=work(name, tuple(range(tokens))))))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ends=st.booleans())
    def speak(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.open[name] += 1
        finish = FinishReason.LENGTH if ends else None
        self.look(self.bench.handle(piece(name, 1, finish=finish)))
        if ends:
            self.look(self.bench.handle(StepOver()))
            assert name in self.ended

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def break_off(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        event = AskFailed(WorkId(name), "x") if fails else Abort(work_id=WorkId(name))
        self.look(self.bench.handle(event))
        if not fails:
            self.end(name)

    @rule()
    def step_ends(self) -> None:
        self.bench.now += 0.1
        self.look(self.bench.handle(StepOver()))

    @invariant()
    def balances(self) -> None:
        load = self.bench.guest.load()
        assert load.held_blocks + load.free_blocks == load.num_blocks
        assert sum(load.owners.values()) >= load.held_blocks
        assert set(load.owners) == {f"work:{name}" for name in self.open}
        # Whoever is first in line has begun: somebody is always being computed.
        if load.num_waiting:
            assert any(name in self.started for name in self.open)


Guests.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGuests = Guests.TestCase

"""Tests one instance's state machine, event by event."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.protocol.instance_counters import ATTEMPT_PREEMPTIONS, STEP_TOKENS
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    PrefillDone,
    PrefillStarted,
    PrefixSource,
    ReserveDecode,
    Resync,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TransferDone,
)
from moonpool.protocol.transfer_events import (
    FetchEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.scheduler.actions import (
    AbortStream,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    GrantRead,
    RunStep,
    SendBlocks,
    SendReport,
    StartStream,
    StepEnded,
    StepFailed,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import BlockKey, FinishReason, InstanceId, Role, SamplingParams, Slo, Token

T = TypeVar("T")
SIZE = 4  # number of tokens of a block
EOS = 0
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=SIZE,
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
)
COST = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.0, 0.01, 0.0), transfer_latency_s=0.1)
PEER = PeerAddress(
    instance_id=InstanceId("peer"), host_id="h", unix_name="", tcp_host="x", tcp_port=1
)


def attempt(name: str = "w", num_tokens: int = 10, first: int = 100, **known: Any) -> AttemptSpec:
    sampling = {k: known.pop(k) for k in list(known) if k in SamplingParams.__struct_fields__}
    values: dict[str, Any] = {
        "token_ids": tuple(range(first, first + num_tokens)),
        "num_prompt_tokens": num_tokens,
        "slo": Slo(ttft_s=1.0, tbt_s=1.0),
        "tenant": "",
        "use_cache": True,
        "timeout_s": 60.0,
        **known,
    }
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    return AttemptSpec(attempt_id=AttemptId(name), sampling=params, **values)


def keys_of(tokens: tuple[int, ...]) -> list[BlockKey]:
    return block_keys(tokens, SIZE, root_key(LAYOUT.fingerprint, ""))


class Bench:
    """Runs an instance that is validated after each event; the test draws the tokens."""

    def __init__(self, role: Role, num_blocks: int = 32, **config: Any) -> None:
        self.instance = Instance(InstanceConfig(**config), LAYOUT, num_blocks, role, COST, (EOS,))
        self.step: RunStep | None = None

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        for step in of(actions, RunStep):
            assert self.step is None, "two steps at a time"
            self.step = step
        return actions

    def end_step(self, token: int = 7) -> list[WorkerAction]:
        step, self.step = self.step, None
        assert step is not None
        tokens = tuple(Token(token) if e.draw is not None else None for e in step.entries)
        return self.handle(StepEnded(tokens, 0.01))

    def fail_step(self) -> list[WorkerAction]:
        self.step = None
        return self.handle(StepFailed("it broke"))

    def lengths(self) -> dict[str, int]:
        return {e.attempt_id: len(e.new_token_ids) for e in self.step.entries} if self.step else {}

    def assert_empty(self) -> None:
        assert not self.instance.requests and self.instance.pool.owners() == {}


def of(actions: list[WorkerAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def reported(actions: list[WorkerAction], kind: type[T]) -> list[T]:
    return [a.report for a in of(actions, SendReport) if isinstance(a.report, kind)]


# Prefill:


def test_a_prompt_is_computed_in_chunks_and_streamed_as_blocks_fill() -> None:
    bench = Bench(Role.PREFILL, chunk_tokens=6)
    first = bench.handle(StartPrefill(attempt=attempt(), target=PEER))
    assert of(first, StartStream) and reported(first, PrefillStarted)[0].cached_tokens == 0
    assert bench.step is not None
    (entry,) = bench.step.entries
    assert (entry.start, len(entry.new_token_ids), entry.draw) == (0, 6, None)
    assert [index for index, _ in entry.sends] == [0], "the second block is not full yet"
    changes = reported(bench.end_step(), BlocksChanged)
    assert list(changes[0].stored) == keys_of(tuple(range(100, 110)))[:1]
    (entry,) = bench.step.entries
    assert (entry.start, len(entry.new_token_ids)) == (6, 4) and entry.draw is not None
    assert [index for index, _ in entry.sends] == [1, 2], "the last block is partial"
    last = bench.end_step()
    assert reported(last, PrefillDone)[0].token == Token(7) and of(last, FinishStream)
    assert bench.instance.pool.num_held == 3, "held until the stream ends"
    bench.handle(SendEnded(stream_id="w"))
    bench.assert_empty()
    assert bench.instance.pool.num_cached == 2


def test_a_cached_prefix_is_sent_at_once_and_not_computed() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=attempt("a"), target=PEER))
    bench.end_step()
    bench.handle(SendEnded(stream_id="a"))
    actions = bench.handle(StartPrefill(attempt=attempt("b", num_tokens=12), target=PEER))
    assert reported(actions, PrefillStarted)[0].cached_tokens == 8
    assert [index for index, _ in of(actions, SendBlocks)[0].blocks] == [0, 1]
    assert bench.lengths() == {"b": 4}


def test_a_wholly_cached_prompt_still_computes_a_token() -> None:
    bench = Bench(Role.PREFILL)
    for name in ("a", "b"):
        bench.handle(StartPrefill(attempt=attempt(name, num_tokens=8), target=PEER))
        assert bench.lengths() == {name: 8 if name == "a" else 4}
        bench.end_step()
        bench.handle(SendEnded(stream_id=name))
    bench.assert_empty()


@pytest.mark.parametrize("known", [{"use_cache": False}, {"tenant": "other"}])
def test_other_tenants_and_private_requests_miss_the_cache(known: dict[str, Any]) -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=attempt("a"), target=PEER))
    bench.end_step()
    bench.handle(StartPrefill(attempt=attempt("b", **known), target=PEER))
    assert bench.lengths() == {"b": 10}


def test_a_private_request_leaves_no_trace() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=attempt(use_cache=False), target=PEER))
    bench.end_step()
    bench.handle(SendEnded(stream_id="w"))
    assert bench.instance.pool.num_cached == 0


def test_an_answer_of_one_token_stops_the_stream() -> None:
    bench = Bench(Role.PREFILL)
    bench.handle(StartPrefill(attempt=attempt(), target=PEER))
    actions = bench.end_step(EOS)
    assert reported(actions, PrefillDone)[0].finish is FinishReason.STOP and of(
        actions, AbortStream
    )
    assert bench.instance.pool.num_held == 3
    bench.handle(SendEnded(stream_id="w", error="aborted"))
    bench.assert_empty()


def test_a_broken_stream_is_reported_and_does_not_stop_the_prefill() -> None:
    bench = Bench(Role.PREFILL, chunk_tokens=4)
    bench.handle(StartPrefill(attempt=attempt(), target=PEER))
    actions = bench.handle(SendEnded(stream_id="w", error="no route"))
    assert reported(actions, StreamBroken)[0].error == "no route"
    bench.end_step()
    assert bench.step is not None and bench.step.entries[0].sends == ()
    bench.end_step()
    assert reported(bench.end_step(), PrefillDone)
    bench.assert_empty()


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    bench = Bench(Role.PREFILL, num_blocks=2)
    (failed,) = reported(bench.handle(StartPrefill(attempt=attempt(), target=PEER)), AttemptFailed)
    assert failed.reason == "no_blocks"
    bench.assert_empty()


def test_a_failed_step_fails_only_its_requests() -> None:
    bench = Bench(Role.PREFILL, chunk_tokens=10)
    bench.handle(StartPrefill(attempt=attempt("a"), target=PEER))
    bench.handle(StartPrefill(attempt=attempt("b", first=500), target=PEER))
    actions = bench.fail_step()
    assert [f.attempt_id for f in reported(actions, AttemptFailed)] == ["a"]
    assert bench.lengths() == {"b": 10}


# Fetches:


def fetching(bench: Bench, num_blocks: int = 2, **known: Any) -> FetchBlocks:
    fetch = PrefixSource(source=PEER, num_blocks=num_blocks)
    actions = bench.handle(StartPrefill(attempt=attempt(**known), fetch=fetch, target=PEER))
    (action,) = of(actions, FetchBlocks)
    return action


def test_fetched_blocks_are_not_computed() -> None:
    bench = Bench(Role.PREFILL)
    action = fetching(bench)
    assert list(action.keys) == keys_of(tuple(range(100, 110))) and bench.step is None
    actions = bench.handle(FetchEnded(fetch_id="w", num_blocks=2, corrupt_slices=1))
    (started,) = reported(actions, PrefillStarted)
    assert (started.cached_tokens, started.fetched_tokens, started.corrupt_slices) == (8, 8, 1)
    assert bench.lengths() == {"w": 2}
    assert set(reported(actions, BlocksChanged)[0].stored) == set(action.keys)


@pytest.mark.parametrize("arrived", [0, 1])
def test_blocks_that_did_not_arrive_are_computed(arrived: int) -> None:
    bench = Bench(Role.PREFILL)
    fetching(bench)
    actions = bench.handle(FetchEnded(fetch_id="w", num_blocks=arrived, error="broken"))
    assert reported(actions, PrefillStarted)[0].cached_tokens == arrived * SIZE
    assert bench.lengths() == {"w": 10 - arrived * SIZE}
    assert bench.instance.pool.num_held == 3


def test_others_do_not_wait_for_a_fetch() -> None:
    bench = Bench(Role.PREFILL)
    fetching(bench)
    bench.handle(StartPrefill(attempt=attempt("b", first=500), target=PEER))
    assert bench.lengths() == {"b": 10}


def test_a_hanging_fetch_times_out_long_before_the_deadline() -> None:
    assert fetching(Bench(Role.PREFILL)).timeout_s < 5.0
    assert fetching(Bench(Role.PREFILL), timeout_s=0.5).timeout_s == 0.5


def test_an_abort_waits_for_the_fetch() -> None:
    bench = Bench(Role.PREFILL)
    fetching(bench)
    bench.handle(Abort(attempt_id=AttemptId("w")))
    assert bench.instance.pool.num_held == 2
    bench.handle(FetchEnded(fetch_id="w", num_blocks=1))
    bench.assert_empty()
    assert bench.instance.pool.num_cached == 1, "arrived blocks stay cached"


def test_a_request_can_use_the_blocks_of_its_own_failed_fetch() -> None:
    """The request must be able to compute its prefix in the blocks of its failed fetch."""
    bench = Bench(Role.PREFILL, num_blocks=3)
    fetching(bench)
    bench.handle(FetchEnded(fetch_id="w", num_blocks=0, error="broken"))
    assert bench.lengths() == {"w": 10}


def test_fetched_blocks_of_later_requests_make_room_for_the_first() -> None:
    bench = Bench(Role.PREFILL, num_blocks=5)
    bench.handle(StartPrefill(attempt=attempt("running", first=900), target=PEER))
    bench.handle(StartPrefill(attempt=attempt("first", num_tokens=16, first=500), target=PEER))
    fetching(bench)
    bench.handle(FetchEnded(fetch_id="w", num_blocks=2))
    bench.end_step()
    assert bench.step is None, "the handover still holds its blocks"
    bench.handle(SendEnded(stream_id="running"))
    assert bench.lengths() == {"first": 16}


def test_reads_hold_blocks_until_they_end() -> None:
    bench = Bench(Role.PREFILL, num_blocks=3)
    bench.handle(StartPrefill(attempt=attempt(), target=PEER))
    bench.end_step()
    bench.handle(SendEnded(stream_id="w"))
    keys = keys_of(tuple(range(100, 110)))
    unknown = BlockKey(b"?" * 16)
    actions = bench.handle(ReadRequested(read_id="x", keys=(*keys, unknown)))
    assert len(of(actions, GrantRead)[0].block_ids) == 2
    assert bench.instance.pool.num_held == 2
    nothing = bench.handle(ReadRequested(read_id="y", keys=(unknown,)))
    assert of(nothing, GrantRead)[0].block_ids == []
    bench.handle(ReadEnded(read_id="y"))
    granted = of(actions, GrantRead)[0].block_ids
    bench.handle(ReadEnded(read_id="x", corrupt=(granted[1],)))  # the block has changed in memory
    assert bench.instance.pool.match(keys) == [granted[0]]
    bench.assert_empty()


# Decode:


def reserved(bench: Bench, name: str = "w", **known: Any) -> ExpectStream:
    actions = bench.handle(ReserveDecode(attempt=attempt(name, **known)))
    (expect,) = of(actions, ExpectStream)
    return expect


def start(name: str = "w", token: int = 7) -> StartDecode:
    return StartDecode(attempt_id=AttemptId(name), token=Token(token))


def test_a_decode_begins_with_its_kvcache_and_first_token() -> None:
    for order in (0, 1):
        bench = Bench(Role.DECODE)
        expect = reserved(bench)
        assert (expect.first_index, len(expect.block_ids)) == (0, 3)
        events: list[WorkerEvent] = [start(), ReceiveEnded(stream_id="w")]
        one = bench.handle(events[order])
        assert bench.step is None
        two = bench.handle(events[1 - order])
        assert (
            len(reported(one + two, DecodeAccepted)) == len(reported(one + two, TransferDone)) == 1
        )
        assert bench.step is not None
        (entry,) = bench.step.entries
        assert (entry.start, list(entry.new_token_ids), list(entry.generated)) == (10, [7], [7])
        (tokens,) = reported(bench.end_step(8), StepTokens)
        assert tokens.attempts[0].tokens == (Token(8),)


def test_cached_blocks_are_not_received() -> None:
    bench = Bench(Role.DECODE)
    reserved(bench, "a")
    bench.handle(ReceiveEnded(stream_id="a"))
    bench.handle(Abort(attempt_id=AttemptId("a")))
    expect = reserved(bench, "b")
    assert (expect.first_index, len(expect.block_ids)) == (2, 1)


def test_a_decode_without_room_fails() -> None:
    bench = Bench(Role.DECODE, num_blocks=2)
    actions = bench.handle(ReserveDecode(attempt=attempt()))
    assert reported(actions, AttemptFailed)[0].reason == "no_blocks" and not of(
        actions, ExpectStream
    )
    bench.assert_empty()


def test_the_slo_is_checked_again() -> None:
    bench = Bench(Role.DECODE)
    strict = Slo(ttft_s=1.0, tbt_s=0.015)
    for name, first in (("a", 100), ("b", 500)):
        reserved(bench, name, first=first, slo=strict)
        bench.handle(ReceiveEnded(stream_id=name))
    assert reported(bench.handle(start("a")), DecodeAccepted)
    (failed,) = reported(bench.handle(start("b")), AttemptFailed)
    assert failed.reason == "tbt_slo" and "0.020 s; above" in failed.message
    assert list(bench.instance.requests) == ["a"]


def test_an_abort_waits_for_the_stream() -> None:
    bench = Bench(Role.DECODE)
    reserved(bench)
    assert of(bench.handle(Abort(attempt_id=AttemptId("w"))), CancelStream)
    assert bench.instance.pool.num_held == 3
    assert not bench.handle(Abort(attempt_id=AttemptId("w"))), "a second abort has no effect"
    assert not reported(bench.handle(start()), DecodeAccepted)
    bench.handle(ReceiveEnded(stream_id="w"))
    bench.assert_empty()


def test_an_abort_waits_for_the_step() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt()))
    bench.handle(Abort(attempt_id=AttemptId("w")))
    assert bench.instance.pool.num_held == 3
    assert not reported(bench.end_step(), StepTokens)
    bench.assert_empty()


# Ends of answers:


@pytest.mark.parametrize(
    ("known", "draws", "finish"),
    [
        ({"max_tokens": 3}, (7, 7, 7), FinishReason.LENGTH),
        ({}, (7, EOS), FinishReason.STOP),
        ({"max_tokens": 2, "ignore_eos": True}, (EOS, EOS), FinishReason.LENGTH),
        ({"min_tokens": 3}, (EOS, EOS, EOS), FinishReason.STOP),
        ({"stop_token_ids": (9,)}, (7, 9), FinishReason.STOP),
        ({"stop_token_ids": (9,), "ignore_eos": True}, (EOS, 9), FinishReason.STOP),
        ({"max_tokens": 2}, (7, EOS), FinishReason.STOP),
    ],
)
def test_finish(known: dict[str, Any], draws: tuple[int, ...], finish: FinishReason) -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt(**known)))
    ends = []
    for draw in draws:
        ends += [t.attempts[0].finish for t in reported(bench.end_step(draw), StepTokens)]
    assert ends == [None] * (len(draws) - 1) + [finish]
    assert bench.step is None
    bench.assert_empty()


def test_a_second_attempt_counts_earlier_generated_tokens() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt(num_prompt_tokens=8, max_tokens=3)))
    assert bench.step is not None and list(bench.step.entries[0].generated) == [108, 109]
    assert reported(bench.end_step(), StepTokens)[0].attempts[0].finish is FinishReason.LENGTH


def test_blocks_of_the_answer_are_cached_too() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt(num_tokens=6, max_tokens=4)))
    for draw in (1, 2, 3, 4):
        bench.end_step(draw)
    bench.assert_empty()
    turn = (*range(100, 106), 1, 2, 3, 4, 50)
    bench.handle(StartPrefill(attempt=attempt("next", len(turn), token_ids=turn)))
    assert bench.lengths() == {"next": 3}, "the last token drawn was never computed"


# Batches and room:


def test_decodes_do_not_wait_for_a_long_prefill() -> None:
    bench = Bench(Role.MIXED, chunk_tokens=8)
    bench.handle(StartPrefill(attempt=attempt("a", num_tokens=4)))
    bench.handle(StartPrefill(attempt=attempt("b", num_tokens=20, first=500)))
    for expected in ({"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"a": 1, "b": 1}):
        bench.end_step()
        assert bench.lengths() == expected


def test_preemption_loses_no_token_and_is_not_reported() -> None:
    bench = Bench(Role.MIXED, num_blocks=5)
    bench.handle(StartPrefill(attempt=attempt("old", num_tokens=8, max_tokens=8)))
    bench.handle(StartPrefill(attempt=attempt("young", num_tokens=6, first=500, max_tokens=8)))
    seen: dict[str, list[int]] = {"old": [], "young": []}
    starts: list[str] = []
    for number in range(1, 40):
        if bench.step is None:
            break
        actions = bench.end_step(number)
        starts += [s.attempt_id for s in reported(actions, PrefillStarted)]
        assert not reported(actions, AttemptFailed)
        for report in reported(actions, StepTokens):
            for item in report.attempts:
                seen[item.attempt_id] += [t.token_id for t in item.tokens]
    counters = bench.instance.counters
    assert counters["preemptions"] >= 1
    ended = ATTEMPT_PREEMPTIONS.grown(lambda name: counters.get(name, 0.0))
    assert (sum(ended.counts), ended.sum) == (2, counters["preemptions"]), "both have ended"
    assert len(seen["old"]) == len(seen["young"]) == 8
    assert starts.count("young") <= 1 and starts.count("old") <= 1
    bench.assert_empty()


def test_a_single_decode_waits_for_blocks_that_others_hold() -> None:
    bench = Bench(Role.DECODE, num_blocks=6)
    reserved(bench, "a", num_tokens=7)
    bench.handle(ReceiveEnded(stream_id="a"))
    reserved(bench, "b", num_tokens=12, first=500)  # 4 blocks, whose stream is still to come
    bench.handle(start("a"))
    actions = bench.end_step()  # "a" has 9 tokens, and needs a third block
    assert not reported(actions, AttemptFailed) and bench.step is None
    bench.handle(Abort(attempt_id=AttemptId("b")))
    bench.handle(ReceiveEnded(stream_id="b", error="cancelled"))
    assert "a" in bench.lengths()


def test_an_answer_that_outgrows_the_pool_fails() -> None:
    bench = Bench(Role.MIXED, num_blocks=2)
    bench.handle(StartPrefill(attempt=attempt(num_tokens=7)))
    bench.end_step()
    (failed,) = reported(bench.end_step(), AttemptFailed)
    assert failed.reason == "no_blocks"
    bench.assert_empty()


def test_requests_are_served_in_order() -> None:
    bench = Bench(Role.PREFILL, num_blocks=4)
    for name, tokens, first in (("a", 12, 100), ("b", 16, 300), ("c", 4, 600)):
        bench.handle(
            StartPrefill(attempt=attempt(name, num_tokens=tokens, first=first), target=PEER)
        )
    assert bench.lengths() == {"a": 12}
    bench.end_step()
    assert bench.step is None, "c fits, but must not overtake b"
    bench.handle(SendEnded(stream_id="a"))
    assert bench.lengths() == {"b": 16}


def test_no_more_sequences_than_allowed() -> None:
    bench = Bench(Role.MIXED, max_sequences=2)
    for number in range(3):
        bench.handle(StartPrefill(attempt=attempt(f"w{number}", first=100 * number + 100)))
    bench.end_step()
    assert set(bench.lengths()) == {"w0", "w1"}


# Commands of the head:


def test_a_resync_reports_all_blocks() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt(max_tokens=1)))
    (changed,) = reported(bench.end_step(), BlocksChanged)
    (snapshot,) = reported(bench.handle(Resync()), BlocksSnapshot)
    assert snapshot.next_sequence == changed.sequence + 1
    assert set(snapshot.keys) == set(changed.stored) == set(keys_of(tuple(range(100, 110))))


def test_without_a_head_all_attempts_end() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt("a")))
    bench.handle(ReserveDecode(attempt=attempt("b", first=500)))
    actions = bench.instance.abort_all()
    assert of(actions, CancelStream)
    bench.end_step()
    bench.handle(ReceiveEnded(stream_id="b", error="cancelled"))
    bench.assert_empty()


def test_load_lists_every_owner() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt("a")))
    load = bench.instance.load()
    assert load.owners == {"work:a": 3} and load.held_blocks == 3
    assert (load.num_running, load.num_waiting, load.free_blocks) == (1, 0, 29)


def test_unknown_attempts_are_ignored() -> None:
    bench = Bench(Role.DECODE)
    assert bench.handle(Abort(attempt_id=AttemptId("?"))) == []
    assert bench.handle(start("?")) == []
    assert bench.handle(StopReceiving(attempt_id=AttemptId("?"))) == []


def step_tokens(bench: Bench) -> tuple[int, float]:
    """Counts steps, and the tokens of their prompts and answers."""
    counters = bench.instance.counters
    steps = STEP_TOKENS.grown(lambda name: counters.get(name, 0.0))
    return sum(steps.counts), steps.sum


def test_steps_count_the_tokens_of_prompts_and_of_answers_once() -> None:
    """The counts are the same with chunks or without, and on one instance or on two."""
    for chunk_tokens in (8, 100):
        bench = Bench(Role.MIXED, chunk_tokens=chunk_tokens)
        bench.handle(StartPrefill(attempt=attempt("a", num_tokens=20, max_tokens=4)))
        while bench.step is not None:
            bench.end_step()
        chunks = -(-20 // chunk_tokens)
        assert step_tokens(bench) == (chunks + 3, 24)
    decode = Bench(Role.DECODE)
    reserved(decode)
    decode.handle(start())
    decode.handle(ReceiveEnded(stream_id="w"))
    num_steps = 0
    while decode.step is not None:
        decode.end_step()
        num_steps += 1
    assert step_tokens(decode) == (num_steps, num_steps), "its prompt was computed elsewhere"

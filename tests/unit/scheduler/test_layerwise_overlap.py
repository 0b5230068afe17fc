"""Tests that requests compute while their prefix arrives, and continue if the prefix does not
arrive."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_instance import EOS, LAYOUT, PEER, SIZE, attempt, of, reported
from test_prefix_loader import FAST, KEYS, PROMPT

from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    PrefillDone,
    PrefillStarted,
    PrefixSource,
    StartPrefill,
)
from moonpool.protocol.transfer_events import FetchEnded, FetchProgress, LoadEnded, LoadProgress
from moonpool.scheduler.actions import (
    Arriving,
    FetchBlocks,
    FinishStream,
    LoadBlocks,
    RunStep,
    SendBlocks,
    StartStream,
    StepEnded,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory
from moonpool.types import Role, Token

QUICK = msgspec.structs.replace(
    FAST, network_bytes_per_s=1e9, prefill=(0.01, 0.001, 0.0, 0.0), transfer_latency_s=0.0
)
SLOW = msgspec.structs.replace(QUICK, network_bytes_per_s=1e3)
GRANTED = FetchProgress(fetch_id="w", num_blocks=8)


class Bench:
    """Runs an instance that fetches eight of PROMPT's ten blocks."""

    def __init__(self, cost: Any = QUICK, num_blocks: int = 32, **config: Any) -> None:
        options = {"chunk_tokens": 64, "layer_wise_load": True, **config}
        slots = reversed(range(config.get("ssd_blocks", 0) // 8))
        memory = InstanceMemory([(slot, KEYS[slot]) for slot in slots])
        self.instance = Instance(
            InstanceConfig(**options), LAYOUT, num_blocks, Role.MIXED, cost, (EOS,), memory
        )

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        return actions

    def start(self, target: Any = None) -> FetchBlocks:
        prompt = attempt("w", token_ids=PROMPT)
        command = StartPrefill(attempt=prompt, fetch=PrefixSource(PEER, 8), target=target)
        (fetch,) = of(self.handle(command), FetchBlocks)
        return fetch


def fetched(num_blocks: int, error: str = "") -> FetchEnded:
    return FetchEnded(fetch_id="w", num_blocks=num_blocks, seconds=0.5, error=error)


def test_a_step_begins_with_the_grant_and_waits_for_its_prefix() -> None:
    bench = Bench()
    fetch = bench.start()
    actions = bench.handle(GRANTED)
    (step,) = of(actions, RunStep)
    (entry,) = step.entries
    assert entry.start == 8 * SIZE and len(entry.new_token_ids) == len(PROMPT) - 8 * SIZE
    assert list(entry.block_ids[:8]) == list(fetch.block_ids)
    assert isinstance(entry.arriving, Arriving) and entry.arriving.fetch_id == "w"
    assert 0.0 < entry.arriving.timeout_s < 1.0
    assert not reported(actions, PrefillStarted), "the number of cached tokens is not known yet"
    (started,) = reported(bench.handle(fetched(8)), PrefillStarted)
    assert (started.cached_tokens, started.fetched_tokens) == (8 * SIZE, 8 * SIZE)
    assert started.early and started.fetch_s == 0.5
    actions = bench.handle(StepEnded((Token(7),), 0.1))
    assert bench.instance.pool.num_cached == 10
    assert of(actions, RunStep)[0].entries[0].arriving is None
    assert bench.instance.counters["early_prefills"] == 1


def test_without_layer_wise_loading_the_whole_fetch_is_awaited() -> None:
    bench = Bench(layer_wise_load=False)
    bench.start()
    assert not of(bench.handle(GRANTED), RunStep)
    assert of(bench.handle(fetched(8)), RunStep)


def test_a_step_begins_when_the_rest_takes_no_longer_than_it() -> None:
    """The measured speed of the source must count, not the expected speed."""
    bench = Bench(SLOW)
    bench.start()
    assert not of(bench.handle(GRANTED), RunStep)
    half = msgspec.structs.replace(GRANTED, num_layers=1, seconds=60.0)
    assert not of(bench.handle(half), RunStep)
    assert of(bench.handle(msgspec.structs.replace(half, seconds=0.001)), RunStep)


@pytest.mark.parametrize(("word_s", "begins"), [(1.9, True), (2.1, False)])
def test_a_step_begins_at_the_nearer_of_two_reports(word_s: float, begins: bool) -> None:
    """The rest takes as long as the part that has arrived, which is `word_s` times the step. A step
    that begins now would have to wait for the difference; a step that begins at the next report
    would be late by a step."""
    bench = Bench(SLOW)
    bench.start()
    assert not of(bench.handle(GRANTED), RunStep)
    step_s = 0.01 + 0.001 * (len(PROMPT) - 8 * SIZE)
    half = msgspec.structs.replace(GRANTED, num_layers=1, seconds=word_s * step_s)
    actions = bench.handle(half)
    assert bool(of(actions, RunStep)) == begins
    if begins:
        assert of(actions, RunStep)[0].entries[0].arriving.timeout_s > 2 * word_s * step_s


def test_an_empty_grant_begins_no_step() -> None:
    bench = Bench()
    bench.start()
    assert not of(bench.handle(msgspec.structs.replace(GRANTED, num_blocks=0)), RunStep)


def test_a_smaller_grant_limits_the_overlap() -> None:
    bench = Bench()
    bench.start()
    (step,) = of(bench.handle(msgspec.structs.replace(GRANTED, num_blocks=5)), RunStep)
    assert step.entries[0].start == 5 * SIZE


def test_no_overlap_beside_decodes() -> None:
    bench = Bench()
    (step,) = of(bench.handle(StartPrefill(attempt=attempt("d", num_tokens=9, first=900))), RunStep)
    bench.handle(StepEnded((Token(7),), 0.1))
    bench.start()
    actions = bench.handle(GRANTED) + bench.handle(StepEnded((Token(8),), 0.1))
    assert all(e.arriving is None for s in of(actions, RunStep) for e in s.entries)
    bench.handle(Abort(attempt_id=AttemptId("d")))
    (step,) = of(bench.handle(StepEnded((Token(8),), 0.1)), RunStep)
    assert step.entries[0].arriving is not None


@pytest.mark.parametrize("fetch_first", [True, False])
def test_missed_blocks_are_computed_again_after_the_valid_ones(fetch_first: bool) -> None:
    bench = Bench()
    fetch = bench.start()
    assert of(bench.handle(GRANTED), RunStep)
    ends: list[WorkerEvent] = [fetched(3, "it broke"), StepEnded((Token(7),), 0.1, missed=(0,))]
    first, last = ends if fetch_first else reversed(ends)
    actions = bench.handle(first)
    assert not of(actions, RunStep), "one step at a time, after the transfer"
    actions += bench.handle(last)
    (again,) = of(actions, RunStep)
    (entry,) = again.entries
    assert entry.start == 3 * SIZE and entry.arriving is None
    assert list(entry.block_ids[:3]) == list(fetch.block_ids[:3])
    assert reported(actions, PrefillStarted)[0].cached_tokens == 3 * SIZE
    assert bench.instance.counters["missed_steps"] == 1
    bench.handle(StepEnded((Token(7),), 0.1))
    assert bench.instance.pool.num_cached == 10


def test_a_hanging_source_costs_one_step() -> None:
    bench = Bench()
    bench.start()
    bench.handle(GRANTED)
    assert not of(bench.handle(StepEnded((Token(7),), 0.1, missed=(0,))), RunStep)
    (step,) = of(bench.handle(StartPrefill(attempt=attempt("o", num_tokens=9, first=900))), RunStep)
    assert [entry.attempt_id for entry in step.entries] == ["o"], (
        "other requests run in the meantime"
    )
    bench.handle(fetched(8))
    (step,) = of(bench.handle(StepEnded((Token(7),), 0.1)), RunStep)
    assert {e.attempt_id: e.start for e in step.entries}["w"] == 8 * SIZE


def test_the_stream_gets_arrived_and_recomputed_blocks() -> None:
    bench = Bench()
    bench.start(target=PEER)
    actions = bench.handle(GRANTED)
    assert of(actions, StartStream) and not of(actions, SendBlocks)
    (step,) = of(actions, RunStep)
    assert [index for index, _ in step.entries[0].sends] == [8, 9, 10]
    (sent,) = of(bench.handle(fetched(3, "it broke")), SendBlocks)
    assert [index for index, _ in sent.blocks] == [0, 1, 2]
    (step,) = of(bench.handle(StepEnded((Token(7),), 0.1, missed=(0,))), RunStep)
    assert [index for index, _ in step.entries[0].sends] == list(range(3, 11))
    actions = bench.handle(StepEnded((Token(7),), 0.1))
    assert reported(actions, PrefillDone) and of(actions, FinishStream)


def test_a_request_that_cannot_be_computed_again_fails_alone() -> None:
    bench = Bench(num_blocks=19)
    bench.start()
    bench.handle(GRANTED)
    bench.instance.pool.allocate("somebody", bench.instance.pool.num_available)
    bench.instance.pool.share("somebody", bench.instance.requests[AttemptId("w")].fetched_blocks)
    bench.instance.pool.acquire("somebody", [])
    actions = bench.instance.handle(fetched(3, "it broke"), 0.0)
    actions += bench.instance.handle(StepEnded((Token(7),), 0.1, missed=(0,)), 0.0)
    (failed,) = reported(actions, AttemptFailed)
    assert failed.reason == "no_blocks" and not bench.instance.requests


def test_an_abort_frees_all_blocks_after_the_last_transfer() -> None:
    bench = Bench()
    bench.start()
    bench.handle(GRANTED)
    bench.handle(Abort(attempt_id=AttemptId("w")))
    bench.handle(StepEnded((Token(7),), 0.1, missed=(0,)))
    assert bench.instance.pool.num_held, "the fetch still writes"
    bench.handle(fetched(8))
    assert bench.instance.pool.owners() == {} and not bench.instance.requests


# Loads from the SSD:

DISK = msgspec.structs.replace(QUICK, ssd_read_bytes_per_s=1e9)
BEGUN = LoadProgress(load_id="1")


def loading(**options: Any) -> tuple[Bench, LoadBlocks]:
    """Starts a prefill of PROMPT with its first eight blocks on the SSD."""
    bench = Bench(DISK, ssd_blocks=64, **options)
    command = StartPrefill(attempt=attempt("w", token_ids=PROMPT))
    (load,) = of(bench.handle(command), LoadBlocks)
    return bench, load


def test_a_step_begins_during_a_load() -> None:
    bench, load = loading()
    assert load.by_layer and len(load.block_ids) == 8
    (step,) = of(bench.handle(BEGUN), RunStep)
    (entry,) = step.entries
    assert entry.start == 8 * SIZE
    assert list(entry.block_ids[:8]) == list(load.block_ids)
    assert entry.arriving is not None
    assert (entry.arriving.fetch_id, entry.arriving.load_ids) == ("", ("1",))
    assert not reported(bench.handle(LoadProgress("1", 1, 0.001)), PrefillStarted)
    (started,) = reported(bench.handle(LoadEnded("1", 8, seconds=0.01)), PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens, started.early) == (
        8 * SIZE,
        8 * SIZE,
        True,
    )
    actions = bench.handle(StepEnded((Token(7),), 0.1))
    assert bench.instance.pool.num_cached == 10
    assert of(actions, RunStep)[0].entries[0].arriving is None


def test_a_load_that_is_slow_or_has_not_begun_is_awaited() -> None:
    bench, _ = loading()
    assert not of(bench.handle(LoadProgress("1", 1, 60.0)), RunStep), "the measured speed counts"
    assert of(bench.handle(LoadEnded("1", 8)), RunStep)
    assert not bench.handle(LoadProgress("1", 2, 0.0)), "this report comes too late"


def test_a_failed_load_makes_its_step_void() -> None:
    bench, load = loading()
    bench.handle(BEGUN)
    (started,) = reported(bench.handle(LoadEnded("1", 3, error="damaged")), PrefillStarted)
    assert started.loaded_tokens == 3 * SIZE
    (step,) = of(bench.handle(StepEnded((Token(7),), 0.1, missed=(0,))), RunStep)
    (entry,) = step.entries
    assert entry.start == 3 * SIZE and entry.arriving is None
    assert bench.instance.counters["missed_steps"] == 1
    assert not set(entry.block_ids[3:]) & set(load.block_ids[:3])


def test_the_blocks_of_a_failed_load_serve_its_request() -> None:
    """The pool has room for the prompt only."""
    bench, _ = loading(num_blocks=12)
    bench.handle(BEGUN)
    bench.handle(LoadEnded("1", 0, error="damaged"))
    actions = bench.handle(StepEnded((Token(7),), 0.1, missed=(0,)))
    assert not reported(actions, AttemptFailed)
    assert of(actions, RunStep)[0].entries[0].start == 0


def test_a_hung_load_keeps_its_blocks_from_its_request() -> None:
    bench, load = loading()
    bench.handle(BEGUN)
    bench.handle(LoadEnded("1", 0, error="hung", hung=True))
    (step,) = of(bench.handle(StepEnded((Token(7),), 0.1, missed=(0,))), RunStep)
    assert not set(step.entries[0].block_ids) & set(load.block_ids)


def test_without_layer_wise_loading_the_ssd_is_read_block_by_block() -> None:
    bench, load = loading(layer_wise_load=False)
    assert not load.by_layer
    assert not of(bench.handle(BEGUN), RunStep)

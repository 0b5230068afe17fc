"""Tests the simulated engine: ground-truth step times, decodes advanced together, pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import StepCost
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import RunStep, StepEnded, StepEntry, StepsEnded
from moonpool.sim.clock import Clock, Priority
from moonpool.sim.engine import EOS_TOKEN_ID, SimEngine
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.parallel_cost import Nic, PipelineCost
from moonpool.types import BlockId, SamplingParams

COST = FittedCost(prefill=(0.5, 0.001, 1e-7, 2e-7), decode=(0.02, 0.001, 1e-6))
GREEDY = SamplingParams(temperature=0.0)


def prefill(name: str, start: int, num_tokens: int, last: bool = True) -> StepEntry:
    draw = GREEDY if last else None
    return StepEntry(
        AttemptId(name), range(start, start + num_tokens), start, [BlockId(0)], draw, (), ()
    )


def decode(name: str, context_tokens: int, num_generated: int = 1) -> StepEntry:
    return StepEntry(
        AttemptId(name), [0], context_tokens - 1, [BlockId(0)], GREEDY, [0] * num_generated, ()
    )


def pipeline(stages: int) -> StepCost:
    shape, device = BUILT_IN.shape("llama3-8b"), BUILT_IN.device("A800-SXM")
    return PipelineCost(COST, 1 / stages, stages, shape, Nic.of(device, 8))


class Bench:
    """Holds an engine, and its events with their times."""

    def __init__(self, outputs: dict[str, int], stages: int = 1) -> None:
        self.clock = Clock()
        self.posted: list[tuple[float, StepEnded | StepsEnded]] = []
        self.prefill_s: dict[str, float] = {}
        cost = COST if stages == 1 else pipeline(stages)
        self.engine = SimEngine(
            self.clock,
            cost,
            lambda attempt_id: outputs[attempt_id],
            lambda attempt_id: 0,
            lambda event: self.posted.append((self.clock.now, event)),
            lambda has_chunks, begins: 1.0,
            self._note,
        )

    def _note(self, attempt_id: AttemptId, seconds: float) -> None:
        self.prefill_s[attempt_id] = self.prefill_s.get(attempt_id, 0.0) + seconds


def test_a_prompt_takes_the_ground_truth_time_in_any_chunks() -> None:
    whole, cut = Bench({"a": 5}), Bench({"a": 5})
    whole.engine.submit(RunStep((prefill("a", 100, 900),)))
    whole.clock.run()
    for start, num_tokens in ((100, 300), (400, 300), (700, 300)):
        cut.engine.submit(RunStep((prefill("a", start, num_tokens, last=start == 700),)))
        cut.clock.run()
    assert whole.posted[0][0] == pytest.approx(COST.prefill_s(1000, 100))
    assert cut.clock.now == pytest.approx(whole.clock.now)
    assert cut.prefill_s == pytest.approx(whole.prefill_s)
    assert [event.tokens for _, event in cut.posted][:2] == [(None,), (None,)]


def test_the_first_token_ends_an_answer_of_one() -> None:
    bench = Bench({"a": 1, "b": 2})
    bench.engine.submit(RunStep((prefill("a", 0, 10), prefill("b", 0, 10))))
    bench.clock.run()
    first, second = bench.posted[0][1].tokens
    assert (first.token_id == EOS_TOKEN_ID, second.token_id == EOS_TOKEN_ID) == (True, False)


@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(1, 5000)), min_size=1, max_size=6),
    st.integers(2, 64),
)
@settings(max_examples=50, deadline=None)
def test_steps_advanced_together_take_as_long_as_one_by_one(
    works: list[tuple[int, int]], max_repeats: int
) -> None:
    outputs = {str(i): output for i, (output, _) in enumerate(works)}
    entries = tuple(decode(str(i), context) for i, (_, context) in enumerate(works))
    together = Bench(outputs)
    together.engine.submit(RunStep(entries, max_repeats))
    together.clock.run()
    ((end_s, event),) = together.posted
    assert isinstance(event, StepsEnded)
    num_steps = min(max_repeats, min(outputs.values()) - 1)
    assert {len(tokens) for tokens in event.tokens} == {num_steps}
    for i, tokens in enumerate(event.tokens):
        ends = outputs[str(i)] == 1 + num_steps
        assert (tokens[-1].token_id == EOS_TOKEN_ID) is ends
        assert all(token.token_id != EOS_TOKEN_ID for token in tokens[:-1])
    contexts = [context for _, context in works]
    expected_s = sum(
        COST.decode_step_s(len(works), sum(contexts) + k * len(works)) for k in range(num_steps)
    )
    assert end_s == pytest.approx(expected_s) == event.seconds


@given(st.floats(0.0, 1.5))
@settings(max_examples=50, deadline=None)
def test_a_stopped_repetition_ends_with_the_step_under_way(share: float) -> None:
    bench = Bench({"a": 1000})
    bench.engine.submit(RunStep((decode("a", 1000),), 20))
    whole_s = sum(COST.decode_step_s(1, 1000 + k) for k in range(20))
    stop_s = share * whole_s
    bench.clock.at(stop_s, Priority.MESSAGE, bench.engine.stop_repeating)
    bench.clock.run()
    ((_, event),) = bench.posted
    assert isinstance(event, StepsEnded)
    num_steps = len(event.tokens[0])
    ends_s = [sum(COST.decode_step_s(1, 1000 + k) for k in range(n)) for n in range(21)]
    assert event.seconds == pytest.approx(ends_s[num_steps])
    if share < 1.0:
        assert ends_s[num_steps] >= stop_s - 1e-9
        assert num_steps == 1 or ends_s[num_steps - 1] < stop_s + 1e-9
    else:
        assert num_steps == 20


def test_decodes_that_ride_along_do_not_read_the_weights_again() -> None:
    bench = Bench({"a": 5, "b": 5})
    bench.engine.submit(RunStep((prefill("a", 0, 1000), decode("b", 500))))
    bench.clock.run()
    alone_s = COST.prefill_s(1000, 0)
    e, f, g = COST.decode
    assert bench.posted[0][0] == pytest.approx(alone_s + f + 500 * g)
    decode_s = e + f + 500 * g
    assert bench.prefill_s == {"a": pytest.approx(bench.posted[0][0] - decode_s)}
    assert bench.posted[0][0] < alone_s + e


def test_chunks_flow_through_a_pipeline_and_bubbles_are_counted() -> None:
    bench = Bench({"a": 5, "b": 5}, stages=4)
    for number in range(5):
        start = 400 * number
        bench.engine.submit(RunStep((prefill("a", start, 400, last=number == 4),)))
    bench.clock.run()
    stage_s = [
        (COST.prefill_s(400 * (n + 1), 0) - (COST.prefill_s(400 * n, 0) if n else 0)) / 4
        for n in range(5)
    ]
    assert len(bench.posted) == 5
    ideal_s = sum(stage_s) + 3 * max(stage_s)
    assert sum(stage_s) * 4 > bench.clock.now >= sum(stage_s) + 3 * stage_s[-1]
    assert bench.clock.now <= ideal_s + 3 * 0.01
    idle_from_s = bench.clock.now
    bench.clock.at(
        idle_from_s + 2.0, Priority.ARRIVAL, bench.engine.submit, RunStep((prefill("b", 0, 400),))
    )
    bench.clock.run()
    assert bench.engine.figures.bubble_s == pytest.approx(2.0)
    assert bench.engine.figures.num_bubbles == 1


def test_busy_time_is_that_until_now_whatever_is_under_way() -> None:
    bench = Bench({"p": 9, "d": 60})
    clock, engine = bench.clock, bench.engine
    engine.submit(RunStep((prefill("p", 0, 1000),)))
    took_s = COST.prefill_s(1000, 0)
    clock.run(until=0.25)
    assert engine.busy_s == pytest.approx(0.25)
    clock.run(until=took_s + 1.0)
    assert engine.busy_s == pytest.approx(took_s)
    engine.submit(RunStep((decode("d", 1000),), 50))
    clock.run(until=took_s + 1.5)
    assert engine.busy_s == pytest.approx(took_s + 0.5)
    clock.run()
    assert engine.busy_s == engine.figures.busy_s > took_s + 0.5


def test_busy_time_of_a_pipeline_is_that_of_its_first_stage() -> None:
    bench = Bench({"p": 9, "q": 9}, stages=4)
    for name in ("p", "q"):
        bench.engine.submit(RunStep((prefill(name, 0, 1000),)))
    stage_s = bench.engine.figures.busy_s / 2
    for stages, busy_stages in ((0.5, 0.5), (1.5, 1.5), (3.0, 2.0)):
        bench.clock.run(until=stages * stage_s)
        assert bench.engine.busy_s == pytest.approx(busy_stages * stage_s)


@pytest.mark.parametrize("arrives", [0.5, 3.0])
def test_a_step_that_waits_ends_a_layer_after_what_it_waited_for(arrives: float) -> None:
    """The request ends when its last layer is computed, if that is later than the arrival plus a
    layer."""
    bench = Bench({"a": 5})
    computed_s = COST.prefill_s(1000, 100)
    bench.engine.submit(RunStep((prefill("a", 100, 900),)), held_layers=10)
    at_s = arrives * computed_s
    bench.clock.at(at_s, Priority.TRANSFER_END, bench.engine.release, ())
    bench.clock.run()
    ((end_s, event),) = bench.posted
    assert isinstance(event, StepEnded) and event.missed == ()
    assert end_s == pytest.approx(max(computed_s, at_s + computed_s / 10 if arrives > 1 else 0.0))


def test_a_held_step_reports_missed_entries() -> None:
    bench = Bench({"a": 5})
    bench.engine.submit(RunStep((prefill("a", 100, 900),)), held_layers=10)
    bench.engine.release((0,))
    bench.clock.run()
    event = bench.posted[0][1]
    assert isinstance(event, StepEnded) and event.missed == (0,)

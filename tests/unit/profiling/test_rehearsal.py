"""Tests the predictions with which single steps of a rehearsal are compared, by batch and by the
number of computing neighbours."""

from __future__ import annotations

import pytest

from moonpool.cost.fitted import FittedCost
from moonpool_lab.profiling.learned_decode_steps import (
    RehearsedRequest,
    equally_likely,
    step_spread,
)

COST = FittedCost(prefill=(0.0, 1e-4, 0.0, 0.0), decode=(0.008, 0.002, 0.0), contention=(1.0, 1.5))


def answer(
    begins_s: float, gap_s: float, count: int = 40, prefill: str = "prefill-0", first_s: float = 0.0
) -> RehearsedRequest:
    """`first_s` is the additional length of the first gap."""
    instants_s = [begins_s, *(begins_s + first_s + gap_s * (i + 1) for i in range(count))]
    return RehearsedRequest(prefill, "decode-0", begins_s - 0.1, begins_s, 100, tuple(instants_s))


def test_one_answer_alone_that_takes_what_was_predicted() -> None:
    alone, beside, beginning = step_spread([answer(1.0, 0.010)], COST, 2)
    assert alone == beside == beginning == pytest.approx([1.0] * 32)


def test_two_in_a_batch_are_compared_with_two() -> None:
    found = [answer(1.0, 0.012), answer(1.0, 0.012)]
    alone, _, _ = step_spread(found, COST, 2)
    assert alone == pytest.approx([1.0] * 32, rel=1e-3)


def test_what_computes_beside_is_a_class_of_its_own() -> None:
    """Contention explains the steps of 15 ms beside a prefill. The other steps are slower than
    predicted by half."""
    other = RehearsedRequest("prefill-0", "decode-1", 2.0, 9.0, 100, (9.0, 9.1))
    found = [answer(1.0, 0.015, 200), other]
    alone, beside, _ = step_spread(found, COST, 2)
    assert alone == pytest.approx([1.5] * 32, rel=1e-3)
    assert beside == pytest.approx([1.0] * 32, rel=1e-3)


def test_the_beginning_of_answers_is_another() -> None:
    found = [answer(float(i), 0.010, first_s=0.020) for i in range(1, 40)]
    alone, _, beginning = step_spread(found, COST, 2)
    assert alone == pytest.approx([1.0] * 32, rel=1e-3)
    assert beginning == pytest.approx([3.0] * 32, rel=1e-3)


def test_steps_with_prompts_in_them_say_nothing() -> None:
    found = [answer(1.0, 0.010, 100), answer(1.5, 0.010, 100, prefill="decode-0")]
    alone, _, _ = step_spread(found, COST, 2)
    assert max(alone) < 1.1
    held_up = answer(1.0, 0.010, 60)
    late = (*held_up.instants_s[:50], *(s + 1.0 for s in held_up.instants_s[50:]))
    alone, _, _ = step_spread(
        [RehearsedRequest("prefill-0", "decode-0", 0.9, 1.0, 100, late)], COST, 2
    )
    assert 1.0 < max(alone) <= 20.0 and alone[-2] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [32, 33, 47, 63, 64, 100])
def test_the_mean_of_all_ratios_stays(count: int) -> None:
    ratios = [1.0 + 0.1 * (n % 7) + (5.0 if n % 11 == 0 else 0.0) for n in range(count)]
    found = equally_likely(ratios)
    assert len(found) == 32 and list(found) == sorted(found)
    assert sum(found) / 32 == pytest.approx(sum(ratios) / count)

"""Tests that the Conductor wants more instances immediately, but fewer only after a window of lower
demand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moonpool.conductor.roles.autoscale import Autoscale
from tests.unit.conductor.test_role_balance import WINDOW_S, Hall


def scaled(hall: Hall, rps: float, prompt_tokens: int, lasting_s: float) -> list[tuple[int, int]]:
    """Returns the numbers of wanted instances, read every second."""
    autoscale = hall.autoscale  # type: ignore[attr-defined]
    found: list[tuple[int, int]] = []
    end_s, next_s = hall.now + lasting_s, hall.now
    while hall.now < end_s:
        hall.balance.note_arrival(prompt_tokens, 0, 10_000, hall.now)
        hall.now += 1.0 / rps
        if hall.now >= next_s:
            next_s = hall.now + 1.0
            for wanted in autoscale.tick(hall.instance_table, hall.now):
                found.append((wanted.prefill, wanted.decode))
    return found


def new_hall(target: float = 0.5) -> Hall:
    hall = Hall("p0", "d0")
    hall.learn(500, 101)
    hall.autoscale = Autoscale(hall.balance, target, WINDOW_S)  # type: ignore[attr-defined]
    return hall


def test_the_numbers_follow_from_the_demand() -> None:
    """At 4 requests/s, prefill needs 2.0 instances and decode 0.8, if instances are busy for half
    of the time."""
    hall = new_hall()
    assert scaled(hall, 4.0, 500, 6 * WINDOW_S)[-1] == (4, 2)


def test_more_are_wanted_at_once_and_fewer_after_a_window() -> None:
    hall = new_hall()
    scaled(hall, 1.0, 500, 3 * WINDOW_S)
    before_s = hall.now
    assert scaled(hall, 8.0, 500, 30.0)[-1][0] >= 4
    assert hall.now - before_s < 31.0
    assert not scaled(hall, 1.0, 500, 0.9 * WINDOW_S)
    assert scaled(hall, 1.0, 500, 6 * WINDOW_S)[-1] == (1, 1)


def test_nothing_is_wanted_before_anything_is_seen() -> None:
    hall = new_hall()
    assert not hall.autoscale.tick(hall.instance_table, 0.0)  # type: ignore[attr-defined]
    assert hall.autoscale.wanted is None  # type: ignore[attr-defined]


def test_a_pool_that_lost_its_last_instance_keeps_its_number_and_the_other_follows() -> None:
    hall = new_hall()
    assert scaled(hall, 4.0, 500, 6 * WINDOW_S)[-1] == (4, 2)
    hall.instance_table.leave(1)
    assert scaled(hall, 8.0, 500, 6 * WINDOW_S)[-1] == (8, 2)


def test_one_instance_is_wanted_of_a_role_that_never_had_one() -> None:
    hall = Hall("p0")
    hall.learn(500, 101)
    hall.autoscale = Autoscale(hall.balance, 0.5, WINDOW_S)  # type: ignore[attr-defined]
    assert scaled(hall, 4.0, 500, 6 * WINDOW_S)[-1] == (4, 1)


def day(seed: int) -> tuple[Hall, list[str]]:
    """Plays a day of three phases with six instances. Returns the new roles in order, "-" before
    each phase."""
    rng = random.Random(seed)
    hall = Hall(*[f"p{i}" for i in range(3)], *[f"d{i}" for i in range(3)])
    switched: list[str] = []
    for _ in range(3):
        prompt, answer = rng.choice([(50, 900), (3_000, 30), (500, 300)])
        rps = rng.uniform(0.5, 3.0)
        hall.learn(prompt, answer)
        switched.append("-")
        end_s, look_s = hall.now + 2.5 * WINDOW_S, hall.now
        while hall.now < end_s:
            tokens = max(1, int(prompt * rng.choice((0.3, 0.7, 1.0, 2.0))))
            hall.balance.note_arrival(tokens, 0, 10_000, hall.now)
            hall.now += rng.expovariate(rps)
            if hall.now < look_s:
                continue
            look_s = hall.now + 3.0
            advice = hall.advise()
            if advice is not None:
                hall.switch(advice)
                switched.append(advice.role.value)
    return hall, switched


@pytest.mark.long
def test_no_day_of_a_thousand_oscillates() -> None:
    """Within a phase, roles may change in one direction only, except for a single correction."""
    bad = []
    for seed in range(1_000):
        _, switched = day(seed)
        phases = " ".join(switched).split("-")
        turns = [sum(a != b for a, b in pairwise(phase.split())) for phase in phases]
        if max(turns) > 1:
            bad.append((seed, switched))
    assert not bad, bad[:5]

"""Tests the advice on roles: correct demand, a stable ratio under noise, and a switch when the
ratio is wrong."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.roles.role_balance import MARGIN, RoleAdvice, RoleBalance
from moonpool.cost.fitted import FittedCost
from moonpool.types import Role, Slo
from tests.unit.conductor.conductor_instances import COST, info

WINDOW_S = 60.0
SLO = Slo(ttft_s=30.0, tbt_s=0.1)
# A prompt token takes 1 ms. An answer's token takes 1 ms, and 1 / B of 50 ms with B = 50.
EVEN = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.05, 0.001, 0.0))


class Hall:
    """A table and its balance, at which requests of one kind arrive evenly."""

    def __init__(self, *names: str, cost: FittedCost = EVEN, **known: int) -> None:
        self.instance_table = InstanceTable()
        self.balance = RoleBalance(WINDOW_S, SLO)
        self.now = 0.0
        for row, name in enumerate(names):
            self.instance_table.join(row, info(name, cost=cost, num_blocks=100_000, **known))

    def learn(self, prompt_tokens: int, answer_tokens: int) -> None:
        for _ in range(60):
            self.balance.note_answer(prompt_tokens, 0, answer_tokens)

    def offer(
        self, rps: float, prompt_tokens: int, lasting_s: float, rng: random.Random | None = None
    ) -> list[RoleAdvice]:
        """Returns the advice, read every 2 s."""
        advised = []
        end_s, next_look_s = self.now + lasting_s, self.now
        while self.now < end_s:
            tokens = prompt_tokens
            if rng is not None:
                tokens = max(1, int(prompt_tokens * rng.choice((0.2, 0.5, 1.0, 2.3))))
                self.balance.note_answer(tokens, 0, rng.choice((20, 100, 280)))
            self.balance.note_arrival(tokens, 0, 10_000, self.now)
            self.now += rng.expovariate(rps) if rng else 1.0 / rps
            if self.now >= next_look_s:
                next_look_s = self.now + 2.0
                advice = self.advise()
                if advice is not None:
                    advised.append(advice)
        return advised

    def advise(self) -> RoleAdvice | None:
        return self.balance.advise(
            self.instance_table, [(0, 0)] * len(self.instance_table), self.now
        )

    def switch(self, advice: RoleAdvice) -> None:
        """Gives all instances that the advice names its role."""
        self.balance.note_switch(advice.role, self.now)
        prefills = advice.role is Role.PREFILL
        for name in advice.instance_ids:
            row = self.instance_table.ids.index(name)
            self.instance_table.set_role(row, prefills, not prefills)


def test_loads_are_demand_over_what_the_instances_can_do() -> None:
    hall = Hall("p0", "p1", "d0")
    hall.learn(500, 101)
    hall.offer(2.0, 500, 10 * WINDOW_S)
    loads = hall.balance.loads(hall.instance_table, hall.now)
    # Two instances prefill 2 x 0.5 s a second; one decodes 2 x 100 tokens at (1 + 50 / 50) ms.
    assert loads.prefill == pytest.approx(0.5, rel=0.1)
    assert loads.decode == pytest.approx(0.4, rel=0.1)


def test_a_small_memory_makes_decode_dearer() -> None:
    roomy, cramped = Hall("p0", "d0"), Hall("p0", "d0", engine_tokens=5_500)
    for hall in (roomy, cramped):
        hall.learn(500, 101)
        hall.offer(2.0, 500, 10 * WINDOW_S)
    # Ten contexts of 550 tokens fit: a token takes 1 ms + 50 / 10 ms.
    assert cramped.balance.loads(cramped.instance_table, cramped.now).decode == pytest.approx(
        3 * roomy.balance.loads(roomy.instance_table, roomy.now).decode, rel=0.05
    )


def test_sustained_imbalance_is_reported() -> None:
    hall = Hall("p0", "p1", "p2", "d0")
    hall.learn(100, 451)
    advised = hall.offer(1.0, 100, 5 * WINDOW_S)
    assert advised
    advice = advised[-1]
    assert advice.role is Role.DECODE and advice.instance_ids[0].startswith("p")
    assert advice.then.worst <= (1 - MARGIN) * advice.now.worst
    assert "3P+1D" in advice.describe(3, 1) and "2P+2D" in advice.describe(3, 1)


def test_nothing_is_reported_before_enough_was_seen() -> None:
    hall = Hall("p0", "p1", "p2", "d0")
    hall.learn(100, 451)
    assert not hall.offer(1.0, 100, WINDOW_S / 4 - 1.0)
    assert hall.offer(1.0, 100, 10.0)


def test_a_clear_shift_is_found_within_the_short_window() -> None:
    """The advice must name all instances that the new mix needs in one piece of advice."""
    hall = Hall("p0", "p1", "p2", "p3", "d0", "d1")
    hall.learn(500, 101)
    hall.learn(50, 900)
    assert not hall.offer(5.0, 500, 5 * WINDOW_S)
    shift_s = hall.now
    while hall.now < shift_s + 60.0:
        advised = hall.offer(3.0, 50, 2.0)
        if advised:
            break
    assert advised and advised[-1].role is Role.DECODE
    assert hall.now - shift_s <= 40.0
    hall.switch(advised[-1])
    assert len(advised[-1].instance_ids) >= 2


def test_chance_alone_is_no_shift() -> None:
    """A few long prompts make up most of the demand; the short window alone would mislead the
    advice."""
    hall = Hall("p0", "p1", "p2", "p3", "d0", "d1", "d2")
    hall.learn(100, 200)
    hall.learn(8_000, 30)
    rng = random.Random(5)
    for _ in range(1_500):
        tokens = 8_000 if rng.random() < 0.05 else 100
        assert not hall.offer(2.0, tokens, 0.5)


def test_a_burst_is_no_reason() -> None:
    hall = Hall("p0", "p1", "d0", "d1")
    hall.learn(500, 451)
    hall.learn(5_000, 10)
    assert not hall.offer(2.0, 500, 5 * WINDOW_S)
    assert not hall.offer(1.0, 5_000, 0.1 * WINDOW_S)
    assert not hall.offer(2.0, 500, 5 * WINDOW_S)


def test_idle_pools_are_left_alone() -> None:
    hall = Hall("p0", "p1", "p2", "d0")
    hall.learn(100, 451)
    assert not hall.offer(0.3, 100, 5 * WINDOW_S)


def test_the_only_instance_for_long_requests_stays() -> None:
    hall = Hall("p0", "p1", "p2", "d0")
    hall.instance_table.capacity_tokens[0] = 200_000
    hall.learn(100, 451)
    assert {advice.instance_ids[0] for advice in hall.offer(1.0, 100, 5 * WINDOW_S)} == {"p1"}


def test_hardware_suited_to_the_other_role_switches_first() -> None:
    """The number of attempts must not matter. Among equal instances, the one that loses least
    switches."""
    hall = Hall("p0", "p1", "p2", "d0")
    hall.instance_table.decode_s_per_context_token[2] = hall.instance_table.decode_base_s[2] = (
        0.0  # decodes at low cost
    )
    hall.learn(100, 451)
    hall.offer(1.0, 100, 5 * WINDOW_S)
    losses = [(3, 0), (1, 9), (7, 0), (0, 0)]
    advice = hall.balance.advise(hall.instance_table, losses, hall.now)
    assert advice is not None and advice.instance_ids[0] == "p2"
    hall.instance_table.decode_base_s[2] = EVEN.decode[0]
    advice = hall.balance.advise(hall.instance_table, losses, hall.now)
    assert advice is not None and advice.instance_ids[0] == "p1"


def test_mixed_instances_never_switch() -> None:
    hall = Hall("m0", "m1", "m2", cost=COST)
    hall.learn(100, 451)
    assert not hall.offer(1.0, 100, 5 * WINDOW_S)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    num_prefills=st.integers(1, 5),
    num_decodes=st.integers(1, 5),
    prompt_tokens=st.integers(50, 3_000),
    rps=st.floats(0.5, 4.0),
    seed=st.integers(0, 1 << 20),
)
def test_constant_load_with_noise_never_flaps(
    num_prefills: int, num_decodes: int, prompt_tokens: int, rps: float, seed: int
) -> None:
    """The advice must reach a ratio by switches in one direction, and stay there."""
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(num_prefills)] + [f"d{i}" for i in range(num_decodes)]
    hall = Hall(*names)
    roles = []
    for _ in range(40):
        advised = hall.offer(rps, prompt_tokens, WINDOW_S / 2, rng)
        if advised:
            roles.append(advised[-1].role)
            hall.switch(advised[-1])
        assert hall.instance_table.num_prefills >= 1 and hall.instance_table.num_decodes >= 1
    turns = sum(one is not other for one, other in pairwise(roles))
    assert turns <= 1, roles
    assert len(roles) <= num_prefills + num_decodes


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    split=st.sampled_from([(5, 1), (4, 2), (2, 4), (1, 5)]),
    prompt_tokens=st.sampled_from([50, 4_000]),
    seed=st.integers(0, 1 << 20),
)
def test_a_shift_is_followed(split: tuple[int, int], prompt_tokens: int, seed: int) -> None:
    """From any ratio, the pool that is permanently short must get more instances."""
    names = [f"p{i}" for i in range(split[0])] + [f"d{i}" for i in range(split[1])]
    hall = Hall(*names)
    rng = random.Random(seed)
    for _ in range(30):
        advised = hall.offer(3.0, prompt_tokens, WINDOW_S / 2, rng)
        if advised:
            hall.switch(advised[-1])
    loads = hall.balance.loads(hall.instance_table, hall.now)
    prefill, decode = (
        loads.prefill * hall.instance_table.num_prefills,
        loads.decode * hall.instance_table.num_decodes,
    )
    best = min(max(prefill / n, decode / (6 - n)) for n in range(1, 6))
    assert loads.worst < 0.55 or loads.worst <= best * 1.25

"""Tests role changes in a simulated cluster with shifting load, without lost requests."""

from __future__ import annotations

from typing import Any

import pytest
from test_simulation import BLOCK, assert_nothing_left, run

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from moonpool.types import Role


def settings(mode: str, prefill: int, decode: int) -> Config:
    overrides: dict[str, Any] = {
        "cluster": {"prefill": prefill, "decode": decode},
        # With the default, decode instances would help the prefill pool without a change of role.
        "conductor": {
            "role_balance": mode,
            "role_balance_window_s": 60.0,
            "inline_chunks": False,
        },
        "slo": {"ttft_s": 10.0},
    }
    return parse_config("", overrides, DEFAULTS)


def documents(number: int, from_s: float, gap_s: float) -> list[Arrival]:
    """Makes requests whose prompts take 2.6 s of prefill each."""
    tokens = 20_000
    return [
        Arrival(from_s + n * gap_s, tokens, 20, private_keys(int(from_s) + n, tokens, BLOCK))
        for n in range(number)
    ]


@pytest.mark.long
def test_documents_turn_decode_instances_into_prefill_ones() -> None:
    requests = documents(300, 0.0, 1.0)
    fixed, fixed_figures = run(settings("off", 1, 4), requests)
    simulation, figures = run(settings("switch", 1, 4), requests)
    assert_nothing_left(simulation)
    assert figures["roles"]["switches_to"] == {"prefill": 3}
    roles = [node.role for node in simulation.nodes.values()]
    assert roles.count(Role.PREFILL) == 4
    assert figures["effective"] > 1.5 * fixed_figures["effective"]
    assert fixed_figures["roles"]["switches"] == 0 and not fixed.announced
    assert set(figures["utilisation"]) == {"prefill", "decode"}
    assert all(0 < share <= 1 for share in figures["utilisation"].values())


def test_advice_is_announced_without_role_changes() -> None:
    simulation, figures = run(settings("advise", 1, 4), documents(200, 0.0, 1.0))
    assert figures["roles"]["switches"] == 0
    assert [text for _, text in simulation.announced if "prefill instances are short" in text]
    assert figures["utilisation"].keys() == {"prefill", "decode"}


@pytest.mark.long
def test_a_ratio_that_fits_stays() -> None:
    _, figures = run(settings("switch", 4, 1), documents(300, 0.0, 1.0))
    assert figures["roles"]["switches"] == 0

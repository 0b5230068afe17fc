"""Runs whole simulations with a draft model: no gain without right guesses, the expected gain with
right guesses."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

DRAFTS = {"method": "draft_model", "model": "llama3.2-1b"}


def config(acceptance: float | None, engine: Any = None, **tables: Any) -> Config:
    """`acceptance` is None for plain decoding."""
    tables = {"cluster": {"prefill": 1, "decode": 1}} | tables
    if acceptance is not None:
        engine = (engine or {}) | {"speculative_config": DRAFTS}
        tables["hardware"] = tables.get("hardware", {}) | {"draft_acceptance": acceptance}
    return parse_config("", tables | {"engine": engine or {}}, DEFAULTS)


def arrivals(number: int, gap_s: float, answer: int = 300) -> list[Arrival]:
    return [
        Arrival(n * gap_s, 1000 + 700 * (n % 5), answer, private_keys(n, 1000, 512))
        for n in range(number)
    ]


def run(settings: Config, requests: list[Arrival], **options: Any) -> dict[str, Any]:
    simulation = Simulation(settings, build_hardware(settings), SimulationSettings(**options))
    simulation.run(requests)
    for node in simulation.nodes.values():
        node.instance.validate()
        assert not node.instance.requests and node.instance.pool.owners() == {}
    return summarise(simulation, 0.0)


@pytest.mark.parametrize("gap_s", [20.0, 0.5])
def test_guesses_that_are_never_right_never_make_it_faster(gap_s: float) -> None:
    requests = arrivals(12, gap_s)
    plain, wrong = run(config(None), requests), run(config(0.0), requests)
    assert wrong["speculation"]["drafts"] > 0
    assert wrong["speculation"]["accepted_draft_tokens"] == 0
    assert wrong["simulated_s"] >= plain["simulated_s"]
    assert wrong["tbt_s"]["mean"] > plain["tbt_s"]["mean"]
    # The instance learns that drafts do not pay, so drafts cost little.
    assert wrong["tbt_s"]["mean"] < 1.05 * plain["tbt_s"]["mean"]


def test_guesses_that_are_always_right_bring_what_their_steps_promise() -> None:
    """With one request at a time, five tokens must take the time of a step with five rows and four
    rounds."""
    settings, requests = config(1.0), arrivals(5, 60.0, answer=401)
    found = run(settings, requests)
    node = build_hardware(settings).decode
    assert node.draft is not None
    context = 1000 + 1400 + 200  # the mean context
    step_s = node.ground_truth.step_s((), 5, context)
    step_s += 4 * node.draft.ground_truth.step_s((), 1, context)
    assert found["tbt_s"]["mean"] == pytest.approx(step_s / 5, rel=0.1)
    plain = run(config(None), requests)
    assert found["tbt_s"]["mean"] < 0.4 * plain["tbt_s"]["mean"]
    numbers = found["speculation"]
    assert numbers["accepted_draft_tokens"] == numbers["draft_tokens"]
    assert found["output_tokens"] == plain["output_tokens"] == 5 * 401


def test_more_right_guesses_make_it_faster_and_the_share_is_as_told() -> None:
    means = []
    for acceptance in (0.3, 0.6, 0.9):
        found = run(config(acceptance), arrivals(6, 60.0, answer=600))
        means.append(found["tbt_s"]["mean"])
        numbers = found["speculation"]
        wrong = numbers["draft_tokens"] - numbers["accepted_draft_tokens"]
        assert wrong > 0
    assert means[0] > means[1] > means[2]


def test_equal_seeds_give_equal_runs_and_others_differ() -> None:
    settings, requests = config(0.7), arrivals(10, 1.0)
    first, again, other = (run(settings, requests, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first["speculation"] != other["speculation"]


@pytest.mark.parametrize(
    "settings",
    [
        config(0.8, cluster={"mixed": 2, "prefill": 0, "decode": 0}),
        config(0.8, {"decode_pipeline_parallel_size": 2}, hardware={"cost": "roofline"}),
        config(0.8, {"decode_tensor_parallel_size": 2}, hardware={"cost": "roofline"}),
        config(
            0.8,
            hardware={
                "cost": "roofline",
                "attention_device": "H20",
                "attention_devices_per_node": 8,
            },
        ),
    ],
    ids=["mixed", "stages", "ranks", "attention devices"],
)
def test_every_arrangement_uses_it(settings: Config) -> None:
    found = run(settings, arrivals(4, 30.0))
    assert found["completed"] == 4 and found["output_tokens"] == 4 * 300
    assert found["speculation"]["accepted_draft_tokens"] > 4 * 100
    assert found["speculation"]["drafting_s"] > 0.0


def test_an_instance_that_leaves_loses_its_guesses_and_nothing_else() -> None:
    settings = config(0.8, cluster={"prefill": 1, "decode": 2})
    requests = arrivals(8, 0.5, answer=400)
    found = run(settings, requests, drain={"decode-0": 3.0})
    assert found["completed"] == 8 and found["drains"]["left"] == 1
    assert found["output_tokens"] == 8 * 400

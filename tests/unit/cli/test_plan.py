"""Tests `moonpool plan` as a user sees it: an answer, its check, and one line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moonpool.plan.simulation_pool import SimulationPool
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from tests.cli_runner import figures_of, invoke, succeed

SMALL = ("--slo-ttft", "6", "--seeds", "3", "--layout", "disaggregated")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace so even that a few draws of it suffice. Its prompts have two lengths, and the longer
    ones have a cached prefix."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    rows = []
    for number in range(60):
        ids = tuple(range(number * 20, number * 20 + 12))
        at_s = 0.5 * number
        rows.append(TraceRow(at_s, 12 * 512, 30, ids))
        if number % 4 == 0 and number < 50:
            rows.append(
                TraceRow(at_s + 5.1, 15 * 512, 30, (*ids, ids[-1] + 1, ids[-1] + 2, ids[-1] + 3))
            )
    write_trace(iter(sorted(rows, key=lambda row: row.arrived_s)), path)
    return str(path)


def plan_of(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    path = folder / "plan.json"
    done = succeed("plan", *arguments, "--json", path)
    found: dict[str, Any] = json.loads(path.read_bytes())
    assert 0 <= found.pop("plan_s") <= found.pop("wall_s") and found.pop("cpu_s") > 0
    assert found.pop("origin")["command"]
    return found, done.stdout


@pytest.fixture(scope="module")
def answer(trace: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("plan")
    plot = ("--plot", str(folder / "p.svg"))
    found = plan_of(folder, "--trace", trace, *SMALL, "--check", "--processes", "1", *plot)
    assert "<svg" in (folder / "p.svg").read_text()
    return found


@pytest.mark.long
def test_the_default_devices_are_named(trace: str) -> None:
    said = "planning with nodes of 8 A800-SXM, those of Mooncake's paper"
    few = ("--trace", trace, *SMALL, "--runs", "2", "--processes", "1")
    assert said in invoke("plan", *few).stderr
    assert said not in invoke("plan", *few, "--devices", "A800-SXM:8").stderr


def test_it_says_what_to_buy_and_why(answer: tuple[dict[str, Any], str]) -> None:
    found, text = answer
    choice = found["choice"]
    bought = re.search(r"^Buy +(.*) on (?:one node|\d+ nodes) of 8 A800-SXM, with ", text, re.M)
    assert bought is not None and bought[1].rpartition(" ")[2] in ("instance", "instances")
    assert not re.search(r"\b\d+[PDM]\b(?! tokens| of|, )", text), "no code for instances"
    labels = [part["label"] for part in found["answer"]]
    assert labels[:4] == ["Buy", "Costs", "Holds", "Breaks first"]
    for part in found["answer"]:
        assert part["text"] in " ".join(text.split()) and part["text"] in found["advice"]
    assert re.search(r"^Costs +[\d.]+ USD/h, [\d,]+ USD a month; ", text, re.M)
    assert choice["meets"] and choice["share"] >= 0.9 and len(choice["draws"]) == 3
    low, high = choice["another_sample"]["low"], choice["another_sample"]["high"]
    assert low <= choice["share"] <= high
    assert found["complete"] and found["binds"] and found["shares_prefixes"]
    for neighbour in found["neighbours"]:
        cheaper = neighbour["usd_per_h"] < choice["usd_per_h"]
        assert not (cheaper and neighbour["meets"])
        assert neighbour["change"] in text
    costs = [one["usd_per_h"] for one in found["front"]]
    assert costs == sorted(costs)
    room = found["rooms"][0]
    assert room["cluster"] == found["choice"]["cluster"]
    assert f"Up to {room['kept']:g} times the trace's load of " in found["advice"]


def test_the_configuration_has_what_the_plan_says(
    answer: tuple[dict[str, Any], str], trace: str, tmp_path: Path
) -> None:
    """`simulate` with the printed configuration must have the same share of effective requests."""
    found, _ = answer
    config = tmp_path / "c.toml"
    config.write_text(_toml(found["config"]))
    simulated = figures_of(tmp_path / "s.json", "simulate", "--trace", trace, "--config", config)
    share = simulated["effective"] / simulated["requests"]
    assert share == pytest.approx(found["choice"]["share"], abs=1e-6)


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [
            f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None
        ]
    return "\n".join(lines)


def test_the_check_uses_fresh_draws(answer: tuple[dict[str, Any], str]) -> None:
    found, text = answer
    assert found["check"]["conclusion"] in text
    assert found["check"]["promised"]["low"] == pytest.approx(
        found["choice"]["another_sample"]["low"], abs=1e-5
    )
    assert len(found["check"]["shares"]) == 4


@pytest.mark.long
def test_the_number_of_processes_changes_nothing(trace: str, tmp_path: Path) -> None:
    few = ("--trace", trace, *SMALL, "--runs", "8")
    one, text = plan_of(tmp_path, *few, "--processes", "1")
    other, other_text = plan_of(tmp_path, *few, "--processes", "2")
    assert one == other and not one["complete"]
    assert text.splitlines()[:-1] == other_text.splitlines()[:-1]
    assert text.startswith("ended early after ") and "allow more with --runs" in text


def test_a_time_limit_ends_the_search(trace: str, tmp_path: Path) -> None:
    found, text = plan_of(tmp_path, "--trace", trace, *SMALL, "--time-limit", "0.01")
    assert found["choice"] is None and "--time-limit" in found["stopped"]
    assert "the time limit was reached" in text


@pytest.mark.long
def test_an_interrupt_prints_the_best_so_far(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulationPool.run

    def interrupted(self: SimulationPool, *arguments: Any) -> Any:
        if self.num_run >= 6:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(SimulationPool, "run", interrupted)
    path = tmp_path / "plan.json"
    done = invoke("plan", "--trace", trace, *SMALL, "--processes", "1", "--json", str(path))
    assert done.exit_code == 130
    assert done.stdout.startswith("ended early after 6 runs: interrupted; the best so far:\nBuy  ")
    assert "Breaks first  Not known: the search ended before it tried more load" in done.stdout
    assert "    0 runs: running the trace on a first cluster" in done.stderr
    assert json.loads(path.read_bytes())["choice"]["meets"]


@pytest.mark.long
def test_for_more_load_and_for_shorter_prompts(
    trace: str, answer: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    usd_per_h = answer[0]["choice"]["usd_per_h"]
    busier, _ = plan_of(tmp_path, "--trace", trace, *SMALL, "--speed", "2")
    assert busier["choice"]["usd_per_h"] > usd_per_h and busier["run"]["speed"] == 2.0
    shorter, _ = plan_of(tmp_path, "--trace", trace, *SMALL, "--scale-tokens", "1/2")
    assert shorter["choice"]["usd_per_h"] < usd_per_h
    assert shorter["run"]["scale_tokens"] == "1/2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--slo-ttft", "0.1"),
            r"no cluster keeps the SLOs: for 90% of the requests, prefill alone takes",
        ),
        (
            ("--slo-ttft", "0.1", "--attainment", "0.999"),
            r"no cluster keeps the SLOs: for 99.9% of the requests, prefill alone takes",
        ),
        (("--slo-tbt", "0.01"), "no cluster keeps the SLOs: a decode step takes"),
        (("--devices", "H100"), "unknown device 'H100'; did you mean"),
        (("--devices", "A800-SXM,A6000:8"), "there is no price of A6000: give one by --prices"),
        (("--devices", "A40:2"), "llama3-70b does not fit 2 A40"),
        (("--devices", "H100-SXM:many"), "'H100-SXM:many' should be a device and how many"),
        (("--devices", ","), "--devices names none"),
        (("--shape", "llama"), "unknown model shape 'llama'"),
        (("--prices", "nowhere.toml"), "cannot read the price file nowhere.toml"),
        (("--plot", "p.gif"), "its name must end in .png, .svg, .pdf"),
        (("--json", "no/where.json"), "there is no folder no"),
        (("--block-size", "100"), "pool.block_tokens must be a multiple of 16"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], says: str, trace: str) -> None:
    done = invoke("plan", "--trace", trace, *arguments)
    assert done.exit_code == 1, done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and says in lines[0] and lines[0].startswith("moonpool: ")

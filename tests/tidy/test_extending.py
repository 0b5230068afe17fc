"""Every example of docs/extending.md is short, and runs as the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.request_record import RequestRecord
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from tests.forked.commands import run_command

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.S))
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    for line in block.splitlines()
    if line.startswith(("moonpool trace", "moonpool simulate"))
]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, timeout_s=120, folder=folder)


def simulate(folder: Path, *flags: str) -> dict[str, Any]:
    done = run(folder, "simulate", "--trace", "trace.jsonl", *flags, "--json", "figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a working directory with the page's modules and its trace."""
    folder = tmp_path_factory.mktemp("extending")
    for name, code in EXAMPLES.items():
        (folder / f"{name}.py").write_text(code)
    done = run(folder, *COMMANDS[0])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_there_is_an_example_of_each_kind() -> None:
    assert list(EXAMPLES) == ["least_loaded", "short_prompts", "deepest_first", "own_log"]
    assert [command[0] for command in COMMANDS] == ["trace", "simulate", "simulate", "simulate"]
    for name, code in EXAMPLES.items():
        num_lines = sum(bool(line.strip()) for line in code.splitlines())
        assert num_lines <= 30, f"{name} has {num_lines} lines"


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command[-1])
def test_the_commands_of_the_page_run_with_the_policy(folder: Path, command: list[str]) -> None:
    flag, name = command[-2:]
    own = simulate(folder, *command[3:])
    built_in = simulate(folder, *command[3:-2])
    assert name in str(own["config"])
    assert name not in str(built_in["config"])
    own, built_in = ({k: v for k, v in f.items() if k != "config"} for f in (own, built_in))
    assert own["cache"] != built_in["cache"] or own["rejected"] != built_in["rejected"], flag


def test_the_trace_format_of_the_page_reads_a_log(folder: Path) -> None:
    (folder / "log.csv").write_text("ms,prompt,answer\n5000,700,9\n4000,300,8\n")
    done = run(folder, "simulate", "--trace", "log.csv", "--trace-format", "own_log:Log")
    assert done.returncode == 0, done.stderr
    assert "2 in 1 s" in done.stdout


def test_a_policy_chooses_both_instances(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "last_rows.py").write_text(
        "class LastRows:\n"
        "    def __call__(self, context):\n"
        "        return int(context.possible.nonzero()[0][-1])\n"
        "    def score_decode(self, context, tbt_s):\n"
        "        return int(context.decode_possible.nonzero()[0][-1])\n"
    )
    tables = {
        "cluster": {"prefill": 3, "decode": 2},
        "conductor": {
            "placement": "last_rows:LastRows",
            "admission": "none",
            "inline_prefill": False,
        },
    }
    config = parse_config("", tables, DEFAULTS)
    simulation = Simulation(config, build_hardware(config))
    chosen: Counter[tuple[str | None, str | None]] = Counter()
    note_ended = simulation.collector.note_ended

    def note(record: RequestRecord, slo_class: str = "") -> None:
        chosen[record.prefill_instance, record.decode_instance] += 1
        note_ended(record, slo_class)

    monkeypatch.setattr(simulation.collector, "note_ended", note)
    simulation.run(Arrival(i * 0.1, 1000, 20, private_keys(i, 1000, 512)) for i in range(20))
    assert chosen == {("prefill-2", "decode-1"): 20}


MISTAKES = {
    "nowhere:Policy": "there is no module 'nowhere'",
    "mistakes:Nothing": "mistakes.py defines no 'Nothing'",
    "mistakes:NUMBER": "it cannot be called",
    "mistakes:fails": "mistakes.py:5: ZeroDivisionError",
    "mistakes:returns_text": "returned str: it must return an array",
    "mistakes:returns_impossible": "chose row -1, which is not possible",
    "needs_more:Policy": "its module needs 'nothing_like_that'",
    "no policy": "'no policy' is not one of 'random', 'load-balancing'",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(folder: Path, name: str) -> None:
    (folder / "needs_more.py").write_text("import nothing_like_that\n")
    (folder / "mistakes.py").write_text(
        "NUMBER = 7\n\n\n"
        "def fails(context):\n    return 1 / 0\n\n\n"
        "def returns_text(context):\n    return 'p0'\n\n\n"
        "def returns_impossible(context):\n    return -1\n"
    )
    done = run(folder, "simulate", "--trace", "trace.jsonl", "--placement", name)
    assert done.returncode != 0
    assert MISTAKES[name] in done.stderr
    assert "Traceback" not in done.stderr


def test_an_eviction_policy_must_be_complete(folder: Path) -> None:
    code = (
        "class Half:\n    def __init__(self, n):\n        pass\n    def store(self, *known): ...\n"
    )
    (folder / "half.py").write_text(code)
    done = run(folder, "simulate", "--trace", "trace.jsonl", "--eviction", "half:Half")
    assert done.returncode != 0
    assert "pool.eviction half:Half: its policy lacks the method touch" in done.stderr

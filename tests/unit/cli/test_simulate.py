"""Tests `moonpool simulate` as a user sees it: figures, files, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from moonpool.config.tables import Config
from moonpool.cost.fitted import FittedCost
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace
from tests import cli_runner
from tests.cli_runner import invoke

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "simulation.md").read_text()
SIMULATING = PAGE[PAGE.index("## Simulating") : PAGE.index("## Traces")]
CATALOGUE = re.findall(r"```toml\n(.*?)```", SIMULATING, re.S)[0]
PROFILE = FittedCost(prefill=(0.01, 1e-4, 0.0, 1e-9), decode=(0.02, 1e-4, 1e-8))
NUM_REQUESTS = 40
FIGURES = {
    "requests": None,
    "completed": None,
    "rejected": None,
    "rejected_by_reason": None,
    "failed": None,
    "effective": None,
    "goodput_rps": None,
    "ttft_s": {"mean", "p50", "p90", "p99"},
    "tbt_s": {"mean", "p50", "p90", "p99"},
    "tbt_top10_mean_s": {"mean", "p50", "p90", "p99"},
    "cache": {"input_tokens", "hit_tokens", "hit_ratio"},
    "prefill_compute_s": {"mean"},
    "wasted_prefill_s": None,
    "predictions": {"ttft_s", "tbt_s", "decoding"},
    "learned": {"prefill", "decode", "transfer"},
    "transfer": {"bytes", "seconds"},
    "utilisation": {"prefill", "decode"},
    "simulated_s": None,
    "wall_s": None,
    "seed": None,
    "run": {"trace", "speed", "noise"},
    "config": set(Config.__struct_fields__),
}
"""Maps each printed figure to the keys that it must have at least, or to None."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(generate(BUILT_IN["conversation"], num_requests=NUM_REQUESTS, seed=1), path)
    return str(path)


def run(*arguments: str) -> Result:
    return invoke("simulate", *arguments)


def figures_of(folder: Path, *arguments: str) -> dict[str, Any]:
    return cli_runner.figures_of(folder / "f.json", "simulate", *arguments)


def error_of(done: Result, status: int = 1) -> str:
    """Returns the line that says what is wrong. For its own errors, `click` prints the usage above
    this line."""
    assert done.exit_code == status, done.output
    lines = done.stderr.splitlines()
    start = {1: "moonpool: ", 2: "Error: "}[status]
    assert [line for line in lines if line.startswith(start)] == lines[-1:]
    assert status == 2 or len(lines) == 1
    return lines[-1]


def test_figures_are_printed_and_written_by_the_designs_names(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    done = run("--trace", trace, "--json", str(path), "--seed", "3")
    assert done.exit_code == 0, done.output
    shown = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    for name in ("cluster", "requests", "effective", "rejected", "TTFT", "TBT", "cache", "took"):
        assert name in shown
    hardware = "8 prefill + 8 decode instances, each 8 × A800-SXM with llama3-70b"
    assert done.stdout.splitlines()[0].split(maxsplit=1) == ["cluster", hardware]
    found = json.loads(path.read_bytes())
    for name, parts in FIGURES.items():
        assert name in found
        assert parts is None or parts <= set(found[name]), name
    assert found["requests"] == NUM_REQUESTS
    assert found["completed"] + found["rejected"] + found["failed"] == NUM_REQUESTS
    assert found["seed"] == found["config"]["conductor"]["seed"] == 3
    cluster = {"prefill": 8, "decode": 8, "mixed": 0, "attention": 0, "launcher": "local"}
    assert found["config"]["cluster"] == cluster
    assert f"{found['ttft_s']['p50']:.3g}" in done.stdout
    names = set(re.findall(r"^\| `([a-z_0-9]+)[`{]", SIMULATING, re.M))
    assert names == set(found), "the page names the figures"


def test_a_figures_file_keeps_secrets_and_says_what_ran(trace: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[api]\napi_keys = ["a-secret", "another"]\n')
    found = figures_of(tmp_path, "--trace", trace, "--config", str(config), "--speed", "2")
    assert found["config"]["api"]["api_keys"] == 2 and "a-secret" not in json.dumps(found)
    assert found["run"]["trace"] == "t.jsonl" and found["run"]["speed"] == 2.0


@pytest.mark.long
def test_the_same_seed_gives_the_same_bytes_but_for_wall_s(trace: str, tmp_path: Path) -> None:
    found = []
    for hash_seed in ("1", "77"):
        path = tmp_path / f"{hash_seed}.json"
        arguments = ["--trace", trace, "--noise", "0.2", "--seed", "5", "--placement", "random"]
        subprocess.run(
            [sys.executable, "-m", "moonpool", "simulate", *arguments, "--json", str(path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        )
        found.append(re.sub(rb'"wall_s": [0-9.e-]+', b"", path.read_bytes()))
    assert found[0] == found[1] and b"wall_s" not in found[0]
    other = figures_of(
        tmp_path, "--trace", trace, "--noise", "0.2", "--seed", "6", "--placement", "random"
    )
    assert other["ttft_s"] != json.loads(found[0].replace(b",\n  ,", b","))["ttft_s"]


def test_a_report_is_one_page_that_loads_nothing(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    done = run("--trace", trace, "--report", str(path))
    assert done.exit_code == 0, done.output
    assert f"report: {path}" in done.stdout
    page = path.read_text()
    assert page.lower().startswith("<!doctype html>") and "<svg" in page
    assert Path(trace).name in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def test_flags_and_file_shape_the_cluster(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[cluster]\nprefill = 3\ndecode = 2\n[conductor]\nplacement = "random"\n')
    found = figures_of(tmp_path, "--trace", trace, "--config", str(file), "--decode", "4")
    assert found["config"]["cluster"] == {
        "prefill": 3,
        "decode": 4,
        "mixed": 0,
        "attention": 0,
        "launcher": "local",
    }
    assert found["config"]["conductor"]["placement"] == "random"
    some = figures_of(tmp_path, "--trace", trace, "--requests", "10", "--speed", "2")
    assert some["requests"] == 10
    assert some["simulated_s"] < found["simulated_s"]


def test_mixed_instances_stand_alone_or_beside_the_others(trace: str, tmp_path: Path) -> None:
    none = ("--trace", trace, "--admission", "none")
    alone = figures_of(tmp_path, *none, "--mixed", "6")
    assert alone["config"]["cluster"] == {
        "prefill": 0,
        "decode": 0,
        "mixed": 6,
        "attention": 0,
        "launcher": "local",
    }
    assert set(alone["utilisation"]) == {"mixed"} and alone["completed"] == NUM_REQUESTS
    beside = figures_of(tmp_path, *none, "--mixed", "2", "--prefill", "2", "--decode", "2")
    assert set(beside["utilisation"]) == {"prefill", "decode", "mixed"}
    assert beside["completed"] == NUM_REQUESTS


@pytest.mark.parametrize("kind", ["tp", "tp+sp", "pp", "cpp"])
@pytest.mark.parametrize("cost", ["a800-llama3-70b", "roofline"])
def test_groups_of_nodes_serve(kind: str, cost: str, trace: str, tmp_path: Path) -> None:
    group = ("--nodes-per-prefill", "2", "--parallelism", kind, "--cost", cost)
    found = figures_of(tmp_path, "--trace", trace, "--admission", "none", *group)
    assert found["completed"] == NUM_REQUESTS
    assert found["config"]["hardware"]["parallelism"] == kind


@pytest.mark.long
def test_pipelined_mixed_instances_serve(trace: str, tmp_path: Path) -> None:
    group = ("--mixed", "3", "--nodes-per-prefill", "2", "--parallelism", "cpp")
    found = figures_of(tmp_path, "--trace", trace, "--admission", "none", *group)
    assert found["completed"] == NUM_REQUESTS


def test_a_device_of_the_catalogue_needs_no_other_flag(trace: str, tmp_path: Path) -> None:
    found = figures_of(tmp_path, "--trace", trace, "--device", "H100-SXM")
    assert found["config"]["hardware"]["cost"] == "roofline"
    slower = figures_of(tmp_path, "--trace", trace, "--cost", "roofline")
    assert found["prefill_compute_s"]["mean"] < 0.5 * slower["prefill_compute_s"]["mean"]


def test_the_catalogue_of_the_page_adds_what_it_says(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text(CATALOGUE)
    device = re.findall(r"\[devices\.([^\]]+)\]", CATALOGUE)[-1]
    shape = re.findall(r"\[shapes\.([^\]]+)\]", CATALOGUE)[-1]
    named = ("--trace", trace, "--device", device, "--shape", shape)
    assert "unknown device" in error_of(run(*named))
    found = figures_of(tmp_path, *named, "--catalogue", str(file))
    assert found["config"]["hardware"]["device"] == device
    assert found["completed"] == NUM_REQUESTS


def page_commands() -> list[str]:
    found = []
    for block in re.findall(r"```sh\n(.*?)```", SIMULATING, re.S):
        lines = [line.split("#")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
        found += [line for line in lines if line.startswith("moonpool simulate")]
    return found


@pytest.mark.parametrize("command", page_commands())
def test_every_command_of_the_page_runs(
    command: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("more.toml").write_text(CATALOGUE)
    Path("profile.json").write_bytes(msgspec.json.encode(PROFILE))
    words = shlex.split(command)[2:]
    words[words.index("--trace") + 1] = trace
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert f"requests     {NUM_REQUESTS} in" in done.stdout
    written = [words[n + 1] for n, word in enumerate(words) if word in ("--json", "--report")]
    assert all(Path(name).stat().st_size > 1000 for name in written)


BAD_TRACES = {
    "": "is empty",
    '{"a": 1}\n': "no line has an arrival",
    '{"timestamp": 1, "output_length": 3}\n': "no input_length; every row of a mooncake trace",
    '{"timestamp": NaN, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n': "JSON",
    "arrived_at,num_prefill_tokens,num_decode_tokens\nnan,374,44\n": "finite number",
    "arrived_at,num_prefill_tokens,num_decode_tokens\n-3,374,44\n": "finite number",
    "arrived_at,num_prefill_tokens,num_decode_tokens\n1,many,44\n": "many",
}


@pytest.mark.parametrize("text", BAD_TRACES)
def test_a_bad_trace_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    error = error_of(run("--trace", str(path)))
    assert str(path) in error and BAD_TRACES[text] in error


def test_no_trace_at_all_is_one_line(tmp_path: Path) -> None:
    assert "none.jsonl" in error_of(run("--trace", str(tmp_path / "none.jsonl")))
    assert "--trace" in error_of(run(), 2)


MISTAKES = {
    "--decode 0": "at least one prefill and one decode instance",
    "--prefill 0": "at least one prefill and one decode instance",
    "--prefill 70000": "<= 65536",
    "--kv-tokens 4096": "no instance holds more than 4,096: raise pool.dram_tokens_per_instance",
    "--block-size 48": "one must be a multiple of the other",
    "--block-size 50": "pool.block_tokens must be a multiple of 16",
    "--device A801-SXM": "did you mean 'A800-SXM'",
    "--shape llama3-71b": "did you mean 'llama3-70b'",
    "--shape gpt3-175b --devices-per-node 2": "use more devices",
    "--cost a800-llama3-70b --device H200": 'use hardware.cost = "roofline"',
    "--cost rooflin": "did you mean 'roofline'",
    "--cost nowhere.json": "cannot read the profile nowhere.json",
    "--nodes-per-prefill 99": "1 to 64",
    "--shape llama3-8b --nodes-per-prefill 64 --parallelism cpp": "64 stages; use fewer nodes",
    "--config nowhere.toml": "cannot read the config nowhere.toml",
    "--catalogue nowhere.toml": "cannot read the catalogue nowhere.toml",
    "--slo-ttft nan": "slo.ttft_s must be > 0",
    "--load-limit nan": "load_limit must be > 0",
    "--max-num-seqs 0": "max_sequences must be >= 1",
    "--json no/f.json": "cannot write no/f.json: there is no folder no",
    "--report no/r.html": "cannot write no/r.html: there is no folder no",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(
    flags: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert MISTAKES[flags] in error_of(run("--trace", trace, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--placement best", "'kvcache-centric'"),
        ("--admission late", "'predictive'"),
        ("--eviction fifo", "'length-aware'"),
        ("--requests 0", "--requests"),
        ("--noise 1", "--noise"),
        ("--speed 0", "--speed"),
        ("--speed nan", "no number"),
        ("--noise nan", "no number"),
        ("--prefill-belief nan", "no number"),
        ("--config .", "directory"),
        ("--json .", "directory"),
    ],
)
def test_a_value_that_no_flag_takes_is_named(flags: str, said: str, trace: str) -> None:
    assert said in error_of(run("--trace", trace, *flags.split()), 2)


FILES = {
    "--config": {
        '[conductor]\nplacment = "random"\n': "did you mean 'placement'",
        "[conductr]\nseed = 1\n": "did you mean 'conductor'",
        '[conductor]\nplacement = "best"\n': "placement must be one of 'random'",
        "prefill 3": "not valid TOML",
        "\xff": "not UTF-8",
    },
    "--catalogue": {
        "[devics.X]\na = 1\n": "did you mean 'devices'",
        '[devices.X]\nlike = "A900-SXM"\n': "did you mean 'A800-SXM'",
        '[devices.X]\nlike = "H200"\npeek_flops_per_s = 1e15\n': "did you mean 'peak_flops_per_s'",
        '[devices.X]\nlike = "H200"\npeak_flops_per_s = -1.0\n': "must be a positive number",
        "[shapes.mine]\nlayers = 40\n": "is new and lacks hidden",
    },
    "--cost": {
        "{}": "no profile of `moonpool profile --json`",
        "nothing": "no profile",
        '{"prefill": [1, 2], "decode": [1, 2, 3]}': "no profile",
        '{"prefill": [-1, 0, 0, 0], "decode": [1, 0, 0]}': "negative time",
    },
}


@pytest.mark.parametrize(
    ("flag", "text"), [(flag, text) for flag, texts in FILES.items() for text in texts]
)
def test_a_file_that_cannot_be_used_is_one_line(
    flag: str, text: str, trace: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    assert FILES[flag][text] in error_of(run("--trace", trace, flag, str(path)))

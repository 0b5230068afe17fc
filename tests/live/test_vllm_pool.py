"""Runs the pool inside a real vLLM: the next vLLM loads the blocks that the first has computed,
also after kills of vLLM and pool, and with damaged blocks. Needs MOONPOOL_VLLM_PYTHON, the Python
of a vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.live.host_pool import Pool
from tests.live.test_vllm_layout import PYTHON, ROOT, model  # noqa: F401 - a fixture

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    found = Pool("--dram", "256MiB", "--ssd", "256MiB", "--folder", str(tmp_path / "ssd"))
    yield found
    found.close()


@pytest.fixture
def paths(tmp_path: Path) -> str:
    return module_paths(tmp_path)


def module_paths(folder: Path) -> str:
    """Returns the module path of a vLLM, as if both packages were installed beside it."""
    named = folder / "entry-points" / "moonpool_engine-0.dist-info"
    named.mkdir(parents=True)
    text = distribution("moonpool-engine").read_text("entry_points.txt")
    (named / "entry_points.txt").write_text(text or "")
    parts = [ROOT, ROOT / "src", ROOT / "engine" / "src", named.parent]
    return os.pathsep.join(map(str, parts))


def run(
    paths: str,
    folder: str,
    settings: dict[str, Any],
    salt: str = "s",
    other: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Runs a vLLM with these settings of the connector. Returns its answers, the tokens that it
    found in the pool, and its log. `other` names a change of vLLM's interface."""
    if PYTHON is None:
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON")
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    environment = {
        "PYTHONPATH": paths,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    name = "other_interface" if other else "run"
    module = [f"tests.live.vllm_pool.{name}", *([other] if other else [])]
    arguments = [folder, json.dumps(settings), salt, json.dumps(options)]
    done = subprocess.run(
        [PYTHON, "-m", *module, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND"))
    return found | {"log": done.stdout + done.stderr}


# Stages need a warm-up in vLLM's CPU build, which an eager vLLM leaves out.
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"backend": "eager"},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grouped heads", {}),
        ("window", {}),
        ("two groups", {}),
        ("uneven groups", {}),
        ("grouped heads", STAGES),
        ("two groups", STAGES),
    ],
)
def test_a_vllm_finds_what_killed_ones_have_left(
    name: str,
    options: dict[str, Any],
    pool: Pool,
    paths: str,
    model: Any,  # noqa: F811
) -> None:
    folder = model(name)
    there = {"pool": str(pool.socket)}
    plain = run(paths, folder, {"pool": "/nowhere/pool.sock"}, **options)
    first = run(paths, folder, there, **options)
    assert (first["answers"], first["hits"]) == (plain["answers"], 0)
    pool.kill()
    pool.start()
    second = run(paths, folder, there, **options)
    assert second["answers"] == plain["answers"]
    # These are all full blocks of the prompts without the last token: 6, 7, 8 and 9 blocks of 32.
    assert second["hits"] == 32 * (6 + 7 + 8 + 9)
    other = run(paths, folder, there, salt="another tenant", **options)
    assert (other["answers"], other["hits"]) == (plain["answers"], 0)
    for arena in pool.memory.glob("*/arena"):
        data = bytearray(arena.read_bytes())
        for start in range(64, len(data), 512):
            data[start] ^= 0x40
        with arena.open("r+b") as file:
            file.write(data)
    damaged = run(paths, folder, there, **options)
    assert damaged["answers"] == plain["answers"]


def test_a_recurrent_model_is_served_without_the_pool(
    pool: Pool,
    paths: str,
    model: Any,  # noqa: F811
) -> None:
    found = run(paths, model("recurrent"), {"pool": str(pool.socket)})
    assert (len(found["answers"]), found["hits"]) == (4, 0)
    assert b"opening the space" not in pool.log()


OTHERS = {
    "version": ("vLLM 0.99.0", "0.32 and 0.33"),
    "method": ("get_finished", "0.32 and 0.33"),
    "module": ("lacks what its connectors had", "0.32 and 0.33"),
    "request": ("cache_salt", "0.32 and 0.33"),
    "tensors": ("a list", "describes its KVCache otherwise"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_unknown_interface_is_refused_in_one_line(
    other: str,
    pool: Pool,
    paths: str,
    model: Any,  # noqa: F811
) -> None:
    folder, there = model("grouped heads"), {"pool": str(pool.socket)}
    known = run(paths, folder, there)
    found = run(paths, folder, there, other=other)
    assert (found["answers"], found["hits"]) == (known["answers"], 0)
    (line,) = [x for x in found["log"].splitlines() if "without the KVCache pool" in x]
    assert all(part in line for part in OTHERS[other])

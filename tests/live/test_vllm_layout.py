"""Runs the proof of a vLLM's KVCache layout in a real vLLM: it accepts each form of cache, refuses
each planted fault, and leaves vLLM unchanged. Needs MOONPOOL_VLLM_PYTHON, the Python of a vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.vllm_layout.faults import LAYOUTS, MOVERS

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MOONPOOL_VLLM_PYTHON")
CONNECTOR = {
    "kv_connector": "LayoutConnector",
    "kv_connector_module_path": "tests.live.vllm_layout.connector",
    "kv_role": "kv_both",
}
EAGER = {"enforce_eager": True, "num_gpu_blocks_override": 120}
NO_FP8 = (  # backends without fp8 in vLLM 0.32 and 0.33
    "FP8 KV cache on CPU requires x86 with AVX-512 or AMX",
    "--kv-cache-dtype fp8 is not supported by the CPU attention backend on this host",
)
WINDOW_64 = ["sliding window", 64]
FULL = ["full attention", None]


def run_module(name: str, *arguments: str, **environment: str) -> str:
    """Returns what `python -m tests.live.vllm_layout.NAME` of the vLLM prints."""
    if PYTHON is None:
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON")
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "src", "engine/src"))
    settings = {
        "PYTHONPATH": paths,
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [PYTHON, "-m", f"tests.live.vllm_layout.{name}", *arguments],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode and any(text in done.stderr for text in NO_FP8):
        pytest.skip("an fp8 KVCache of vLLM needs a CPU with AVX-512 or AMX")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a model of `models.MODELS`."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in made:
            folder = str(tmp_path_factory.mktemp("model"))
            run_module("models", name, folder)
            made[name] = folder
        return made[name]

    return find


def answers_of(printed: str) -> Any:
    line = next(line for line in printed.splitlines() if line.startswith("ANSWERS"))
    return json.loads(line.removeprefix("ANSWERS"))


def prove(
    folder: str, outcomes: Path, options: dict[str, Any], **environment: str
) -> tuple[list[dict[str, Any]], Any]:
    """Returns the output of the proofs, and vLLM's answers after the proofs."""
    asked = json.dumps(EAGER | options | {"kv_transfer_config": CONNECTOR})
    ranks = options.get("tensor_parallel_size", 1)
    environment |= {"MOONPOOL_TEST_OUTCOMES": str(outcomes)}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    printed = run_module("run", folder, asked, **environment)
    return [json.loads(line) for line in outcomes.read_text().splitlines()], answers_of(printed)


@pytest.mark.parametrize("name", ["grouped heads", "two groups"])
def test_each_planted_fault_is_refused(
    name: str, model: Callable[[str], str], tmp_path: Path
) -> None:
    options = {"block_size": 32}
    said, answers = prove(model(name), tmp_path / "outcomes", options, MOONPOOL_TEST_FAULTS="all")
    found = {line["fault"]: line["refused"] for line in said}
    assert set(found) == {"", *MOVERS, *LAYOUTS, "nothing copied"}
    assert [line["refused"] for line in said if not line["fault"]] == [None, None]
    for fault in found.keys() - {""}:
        assert found[fault], fault
        assert "\n" not in found[fault]
    assert "model.layers.0" in found["K and V swapped"]
    assert all(line["clean"] for line in said)
    alone = run_module("run", model(name), json.dumps(EAGER | options))
    assert answers == answers_of(alone)


@pytest.mark.parametrize(
    ("name", "options", "groups"),
    [
        ("grouped heads", {"block_size": 64}, [FULL]),
        ("grouped heads", {"block_size": 128}, [FULL]),
        ("grouped heads", {"block_size": 32, "enforce_eager": False}, [FULL]),
        ("grouped heads", {"block_size": 32, "kv_cache_dtype": "fp8"}, [FULL]),
        ("grouped heads", {"block_size": 32, "enable_prefix_caching": False}, [FULL]),
        ("grouped heads", {"block_size": 32, "tensor_parallel_size": 2}, [FULL]),
        ("one head", {"block_size": 32}, [FULL]),
        ("window", {"block_size": 32}, [WINDOW_64]),
        ("two groups", {"block_size": 32}, [WINDOW_64, FULL]),
        ("uneven groups", {"block_size": 32}, [WINDOW_64, WINDOW_64, FULL]),
    ],
)
def test_each_form_of_cache_is_proven(
    name: str,
    options: dict[str, Any],
    groups: list[list[Any]],
    model: Callable[[str], str],
    tmp_path: Path,
) -> None:
    said, _ = prove(model(name), tmp_path / "outcomes", options)
    ranks = options.get("tensor_parallel_size", 1)
    assert sorted(line["rank"] for line in said) == list(range(ranks))
    for line in said:
        assert line["refused"] is None
        assert line["clean"]
        assert len(line["backends"]) == sum(layers for *_, layers, _ in line["groups"])
        assert [[kind, window] for kind, _, window, _, _ in line["groups"]] == groups


def test_what_a_vllm_cannot_compute_over_its_own_blocks_is_refused(
    model: Callable[[str], str], tmp_path: Path
) -> None:
    """MLA on a CPU must be refused, whatever the name of its backend. It cannot continue after
    cached blocks. vLLM therefore disables its prefix cache, but would still take blocks from a
    connector, and then answer wrongly."""
    (said,), _ = prove(model("latent"), tmp_path / "outcomes", {"block_size": 32})
    assert [group[0] for group in said["groups"]] == ["MLA"]
    if said["refused"] is None:  # true for a backend that can serve this layout
        assert not any("CPUMLABackend" in name for name in said["backends"].values())
    else:
        assert "over the same blocks a second time" in said["refused"]


def test_it_may_be_proven_at_registration_too(model: Callable[[str], str], tmp_path: Path) -> None:
    """The proof may run at registration if vLLM captures no graph while it warms up, as on a
    CPU."""
    said, _ = prove(
        model("grouped heads"), tmp_path / "outcomes", {"block_size": 32}, MOONPOOL_TEST_EARLY="1"
    )
    assert [line["fault"] for line in said] == ["early", ""]
    assert [line["refused"] for line in said] == [None, None]


def test_a_vllm_without_room_is_refused(model: Callable[[str], str], tmp_path: Path) -> None:
    options = {"block_size": 32, "num_gpu_blocks_override": 17, "max_model_len": 256}
    said, _ = prove(model("grouped heads"), tmp_path / "outcomes", options)
    assert said[0]["refused"] == "a proof needs 19 blocks, vLLM has 17"

"""`moonpool trial` against several systems, one after the other, each started on this machine.

Each system serves the same checkpoint. A system that cannot be started is left out, and the report
says why.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import httpx

from benchmarks.suite.live.vllm_server import VllmServer
from benchmarks.suite.live.vllm_shapes import VllmTarget, start_peer
from moonpool.types import Struct
from moonpool_lab.demo.local_server import LocalServer, ServerError
from moonpool_lab.profiling.live_cluster import LiveCluster
from moonpool_lab.replay.server import ServerUnfitError
from moonpool_lab.trial.disturbances import DisturbanceError

System = Literal["moonpool", "vllm", "vllm-offload", "vllm-lmcache", "vllm-mooncake", "llama.cpp"]
SYSTEMS: tuple[System, ...] = get_args(System)
WORDS: dict[System, str] = {
    "moonpool": "moonpool, 1 prefill + 1 decode",
    "vllm": "vLLM",
    "vllm-offload": "vLLM, offloads KVCache to DRAM",
    "vllm-lmcache": "vLLM with LMCache",
    "vllm-mooncake": "2 vLLM, Mooncake Store",
    "llama.cpp": "llama.cpp's server",
}
CONTEXT_TOKENS = 4096
KV_BLOCKS = 192
"""vLLM's blocks have 32 tokens. The blocks are few, so that blocks are evicted and offloaded ones
come back."""
OFFLOADED_BYTES = 1 << 30
LLAMA_START_S = 120.0
Say = Callable[[str], None]
Try = Callable[[str, bool], dict[str, Any]]
CANNOT_RESET: tuple[System, ...] = ("llama.cpp",)
"""Systems without a route that empties their caches."""


class TrialTargets(Struct, frozen=True):
    """The systems that are tried, and where the others are installed."""

    model: str  # a checkpoint's folder
    gguf: str = ""  # the same model, for llama.cpp
    peer_python: str = ""
    llama_python: str = ""
    cores: str = "0-1"


def bench_trials(
    targets: TrialTargets, systems: Sequence[System], try_one: Try, say: Say
) -> dict[str, Any]:
    """Returns the figures by system, and why some are absent. `try_one` gets a URL, and whether the
    system's cache may be emptied there."""
    servers: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for system in systems:
        say(f"{WORDS[system]}: starts")
        try:
            with start_system(system, targets) as url:
                figures = try_one(url, system not in CANNOT_RESET)
            servers[system] = figures | {"model": Path(figures["model"]).name}
        except (ServerError, ServerUnfitError, DisturbanceError, httpx.HTTPError, OSError) as error:
            absent[system] = " ".join(str(error).split())[:300]
            say(f"{WORDS[system]}: left out: {absent[system]}")
    names = {"model": Path(targets.model).name, "gguf": Path(targets.gguf).name}
    return {"servers": servers, "absent": absent, "targets": names | {"cores": targets.cores}}


def added_to(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns `found`, with those systems of `kept` that have the same targets and were not tried
    again."""
    if kept.get("targets") != found["targets"]:
        return found
    servers = kept["servers"] | found["servers"]
    absent = kept["absent"] | found["absent"]
    absent = {system: why for system, why in absent.items() if system not in found["servers"]}
    servers = {system: one for system, one in servers.items() if system not in found["absent"]}
    return found | {"servers": servers, "absent": absent}


@contextmanager
def start_system(system: System, targets: TrialTargets) -> Iterator[str]:
    """Returns the URL at which the system answers. Raises ServerError."""
    if system == "moonpool":
        arguments = [targets.model, "--prefill", "1", "--decode", "1"]
        with LocalServer(arguments) as server:
            yield server.url
    elif system == "llama.cpp":
        with LlamaServer(targets.llama_python, targets.gguf) as server:
            yield server.url
    elif not targets.peer_python:
        raise ServerError("no --peer-python was given")
    elif system == "vllm-mooncake":
        peer = VllmTarget(python=targets.peer_python, cores=targets.cores, eager=True, shape="pool")
        with start_peer(peer, LiveCluster(model=targets.model), CONTEXT_TOKENS) as url:
            yield url
    else:
        with vllm_server(system, targets) as server:
            yield server.url


def vllm_server(system: System, targets: TrialTargets) -> VllmServer:
    """One vLLM, alone or with a connector that keeps KVCache outside of it."""
    options = {"--max-model-len": CONTEXT_TOKENS, "--num-gpu-blocks-override": KV_BLOCKS}
    flags = ["--enforce-eager"]
    if system != "vllm":
        flags += ["--kv-transfer-config", json.dumps(connector_of(system))]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # it then has /reset_prefix_cache
    if system == "vllm-lmcache":
        environment |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1"}
    return VllmServer(
        targets.peer_python, targets.model, targets.cores, options, flags, environment
    )


def connector_of(system: System) -> dict[str, Any]:
    """vLLM's --kv-transfer-config."""
    if system == "vllm-lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    extra = {"cpu_bytes_to_use": OFFLOADED_BYTES}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class LlamaServer(LocalServer):
    """Runs `python -m llama_cpp.server` of another installation."""

    def __init__(self, python: str, gguf: str) -> None:
        super().__init__((), LLAMA_START_S)
        if not python or not gguf:
            raise ServerError("llama.cpp needs --llama-python and --gguf")
        if not Path(gguf).is_file():
            raise ServerError(f"there is no {gguf}")
        probe = [python, "-c", "import llama_cpp.server"]
        done = subprocess.run(probe, capture_output=True, check=False)
        if done.returncode:
            raise ServerError(f"{python} has no llama_cpp.server: install llama-cpp-python[server]")
        self._arguments = [python, "-m", "llama_cpp.server", "--model", gguf, "--host", "127.0.0.1"]
        self._arguments += ["--port", str(self.port), "--n_ctx", str(CONTEXT_TOKENS)]
        self._environment = dict(self._environment)
        self._environment.pop("PYTHONPATH", None)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

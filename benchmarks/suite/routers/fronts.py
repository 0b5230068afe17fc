"""The fronts of the instances: none, vLLM's own router, Ray Serve's routers, moonpool.

Each is started for its runs, and ends after them. A router that cannot start raises ServerError,
whose line becomes its row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.suite.live.vllm_router import RouterServer
from benchmarks.suite.routers.engines import EngineFleet, RunningEngine
from benchmarks.suite.routers.timed_engine import EngineSpeed
from moonpool.types import Slo, Struct
from moonpool_lab.demo.local_server import LocalServer, ServerError

MEASURED_S = 240.0
TWO_CHOICES = "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter"
PREFIX_AWARE = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
OUR_ROUTER = "moonpool.ray.ConductorRouter"
ROUND_ROBIN = "round-robin"
RAY_FRONT = Path(__file__).with_name("ray_front.py")


class FrontPythons(Struct, frozen=True):
    """Pythons with the installed peers; "" leaves a peer out."""

    router: str = ""
    ray: str = ""


class RunningFront(Struct, frozen=True):
    """`others`: addresses that take requests in turn with `url`. `pid` 0: no process stands between
    client and instances."""

    url: str
    others: tuple[str, ...] = ()
    pid: int = 0


@contextmanager
def start_front(
    name: str,
    fleet: EngineFleet,
    engines: Sequence[RunningEngine],
    pythons: FrontPythons,
    slo: Slo,
) -> Iterator[RunningFront]:
    """Raises ServerError."""
    urls = [engine.url for engine in engines]
    if name == ROUND_ROBIN:
        yield RunningFront(urls[0], tuple(urls[1:]))
        return
    server = FRONTS[name](fleet, engines, pythons, slo)
    with server:
        if name.startswith("moonpool"):
            _wait_measured(server, len(engines))
        yield RunningFront(server.url, pid=server.pid)


def _vllm_router(policy: str) -> Any:
    def make(
        fleet: EngineFleet, engines: Sequence[RunningEngine], pythons: FrontPythons, slo: Slo
    ) -> LocalServer:
        flags = ["--policy", policy]
        if policy == "kv_aware":
            places = [engine.place for engine in engines]
            flags += RouterServer.event_flags(fleet.model, places, fleet.block_tokens)
        _check_python(pythons.router, "--router-python", "vllm-router")
        return RouterServer(pythons.router, [engine.url for engine in engines], flags)

    return make


def _vllm_programs(
    fleet: EngineFleet, engines: Sequence[RunningEngine], pythons: FrontPythons, slo: Slo
) -> LocalServer:
    """vllm-router with its scheduling of programs, as its guide recommends it."""
    _check_python(pythons.router, "--router-python", "vllm-router")
    flags = ["--policy", "cache_aware", "--enable-program-scheduling"]
    flags += ["--program-scheduling-config-json", json.dumps(program_settings(fleet))]
    return RouterServer(pythons.router, [engine.url for engine in engines], flags)


def program_settings(fleet: EngineFleet) -> dict[str, Any]:
    """Returns settings with one queue for all servers, their KVCache and, for stubs, the times that
    its guide says to measure. Times are means over the servers, because it has one model for all.
    All other settings have the program's own defaults."""
    settings: dict[str, Any] = {
        "global_queue": True,
        "token_capacity_per_dp_rank": fleet.kv_tokens,
    }
    if fleet.vllm_python:
        return settings
    speed, factor = EngineSpeed(), statistics.fmean(fleet.speeds)
    chunk_s = fleet.step_tokens * speed.prompt_token_s
    return settings | {
        "prefill_cost_model": {
            "intercept_seconds": factor * (speed.step_s + speed.answer_s),
            "linear_seconds_per_1k_tokens": factor
            * (1e3 * speed.prompt_token_s + 1e3 / fleet.step_tokens * speed.step_s),
            "quadratic_seconds_per_1k_tokens_squared": 0.0,
            "decode_throughput_alpha": speed.step_s / (speed.step_s + chunk_s),
        },
        "decode_throughput_model": {
            "fixed_step_seconds": factor * speed.step_s,
            "batch_step_seconds_per_request": factor * speed.answer_s,
            "context_step_seconds_per_token": factor * speed.context_token_s,
        },
    }


def _on_ray(router: str, knows_slo: bool = False) -> Any:
    def make(
        fleet: EngineFleet, engines: Sequence[RunningEngine], pythons: FrontPythons, slo: Slo
    ) -> LocalServer:
        _check_python(pythons.ray, "--ray-python", "ray[serve]")
        _check_import(pythons.ray, router)
        settings: dict[str, Any] = {}
        if router == OUR_ROUTER:
            settings = {"kv_tokens": fleet.kv_tokens, "block_tokens": fleet.block_tokens}
        if knows_slo:
            settings |= {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}
        return RayFrontServer(pythons.ray, router, settings, [engine.url for engine in engines])

    return make


class RayFrontServer(LocalServer):
    def __init__(
        self, python: str, router: str, settings: Mapping[str, Any], urls: Sequence[str]
    ) -> None:
        super().__init__(())
        words = [str(RAY_FRONT), str(self.port), router, json.dumps(settings), *urls]
        self._arguments = [python, *words]
        self._environment = dict(os.environ)
        self._environment.pop("PYTHONPATH", None)

    def last_words(self, num_lines: int = 5) -> str:
        """Returns the last line of the log, which contains the error of a Python program."""
        return super().last_words(1)


def _moonpool(admission: str, follows_events: bool = True) -> Any:
    def make(
        fleet: EngineFleet, engines: Sequence[RunningEngine], pythons: FrontPythons, slo: Slo
    ) -> LocalServer:
        words = [fleet.model, "--admission", admission]
        words += ["--slo-ttft", f"{slo.ttft_s:g}", "--slo-tbt", f"{slo.tbt_s:g}"]
        for engine in engines:
            words += ["--vllm", engine.place if follows_events else engine.url]
        return LocalServer(words)

    return make


FRONTS: dict[str, Callable[..., LocalServer]] = {
    "vllm-round-robin": _vllm_router("round_robin"),
    "vllm-cache-aware": _vllm_router("cache_aware"),
    "vllm-kv-aware": _vllm_router("kv_aware"),
    "vllm-programs": _vllm_programs,
    "ray-two-choices": _on_ray(TWO_CHOICES),
    "ray-prefix-aware": _on_ray(PREFIX_AWARE),
    "ray-conductor": _on_ray(OUR_ROUTER, knows_slo=True),
    "moonpool-none": _moonpool("none"),
    "moonpool-assumed": _moonpool("goodput", follows_events=False),
    "moonpool": _moonpool("goodput"),
}
FRONT_NAMES = (ROUND_ROBIN, *FRONTS)


def _check_python(python: str, flag: str, package: str) -> None:
    if not python:
        raise ServerError(f"not given: {flag}, the Python of an installation of {package}")
    if not Path(python).exists():
        raise ServerError(f"there is no {python}")


def _check_import(python: str, router: str) -> None:
    """Fails with one line; without this check, Serve would retry the deployment forever. Raises
    ServerError."""
    module, _, name = router.rpartition(".")
    line = f"import aiohttp; from {module} import {name}"
    done = subprocess.run([python, "-c", line], capture_output=True, timeout=300, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
        raise ServerError(f"{Path(python).parent.parent.name} cannot import it: {last[-1]}")


def _wait_measured(server: LocalServer, num_engines: int) -> None:
    """Waits until moonpool, which already serves, has measured the times of all instances."""
    until_s = time.monotonic() + MEASURED_S
    while sum("measured http" in line for line in server.log_lines()) < num_engines:
        if time.monotonic() > until_s:
            raise ServerError(f"the instances were not measured: {server.last_words()}")
        time.sleep(0.2)


def tree_cpu_s(pid: int) -> float:
    """CPU time of a process and of all that descend from it, so far."""
    if not pid:
        return 0.0
    parents: dict[int, list[int]] = {}
    used_s: dict[int, float] = {}
    tick_s = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        own = int(folder.name)
        parents.setdefault(int(fields[1]), []).append(own)
        # Seconds of the process, and of its children that it has waited for.
        used_s[own] = sum(map(int, fields[11:15])) / tick_s
    found = [pid]
    for each in found:  # grows
        found += parents.get(each, ())
    return sum(used_s.get(each, 0.0) for each in found)

"""moonpool and vLLM on one machine under the same requests through HTTP, from light load to far
beyond capacity: how many requests a second meet both SLOs.

SLOs are the same for all: ten times the unloaded P90 of TTFT and five times that of TBT, of
whichever system is slowest unloaded, so that none is asked for more than the paper asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from moonpool.bench.agreement import measure_live, replay_rows, simulated_slo
from moonpool.bench.live_cluster import LiveCluster
from moonpool.bench.live_workload import LiveWorkload, estimate_capacity
from moonpool.bench.local_server import LocalServer, ServerError
from moonpool.bench.overload import SIMULATED_S, UNLOADED_SHARE, measure_unloaded
from moonpool.replay.server import ASSUMED_VOCAB
from moonpool.types import Slo, Struct

START_S = 600.0
KV_GIB = 2
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on a CPU takes blocks of multiples of it."""
Say = Callable[[str], None]


class Peer(Struct, frozen=True):
    """A vLLM: one that runs at `url`, or the Python of its installation to start it with."""

    url: str = ""
    python: str = ""
    cores: str = ""  # such as 0-1; "": all
    eager: bool = False


class PeerServer(LocalServer):
    """`vllm serve` of a checkpoint's folder, with prefix caching and chunked prefill."""

    def __init__(self, peer: Peer, cluster: LiveCluster, longest_tokens: int) -> None:
        super().__init__((), START_S)
        command = Path(peer.python).with_name("vllm")
        if not command.exists():
            raise ServerError(f"there is no {command}: --peer-python must be that of a vLLM")
        options = {
            "--port": self.port,
            "--host": "127.0.0.1",
            "--dtype": "bfloat16",
            "--block-size": -(-cluster.block_tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS,
            "--max-model-len": longest_tokens,
            "--max-num-batched-tokens": max(cluster.chunk_tokens, 1),
            "--max-num-seqs": cluster.max_sequences,
        }
        words = [str(word) for pair in options.items() for word in pair]
        flags = ["--enable-prefix-caching", "--enable-chunked-prefill"]
        flags += ["--enable-prompt-tokens-details"]  # tells its hits
        flags += ["--enforce-eager"] if peer.eager else []
        self._arguments = [str(command), "serve", cluster.model, *words, *flags]
        cores = peer.cores or f"0-{(os.cpu_count() or 1) - 1}"
        self._environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        self._environment.pop("PYTHONPATH", None)  # ours is not its

    def last_words(self, num_lines: int = 5) -> str:
        """What went wrong first: vLLM's last lines only say that something did."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        causes = [line.strip() for line in lines if "Error: " in line]
        return causes[0] if causes else super().last_words(num_lines)


def bench_peers_live(
    cluster: LiveCluster,
    workload: LiveWorkload,
    peer: Peer,
    loads: Sequence[float],
    seconds: float,
    say: Say,
) -> dict[str, Any]:
    """Curves by system. Loads are multiples of what the simulator gives two colocated instances.
    Raises what servers and replays raise."""
    split = cluster.with_(prefill=1, decode=1, mixed=0)
    mixed = cluster.with_(prefill=0, decode=0, mixed=2)
    with LocalServer(mixed.with_(admission="none").arguments()) as server:
        profile = measure_live(server.url, workload, say)
    rough = simulated_slo(mixed, profile, workload)
    base_rps = estimate_capacity(mixed, profile, workload, SIMULATED_S, rough)
    systems: dict[str, Callable[[], Any]] = {
        f"moonpool {split.words}": lambda: _ours(split),
        f"moonpool {mixed.words}": lambda: _ours(mixed),
        "vLLM": lambda: _theirs(peer, cluster, workload),
    }
    unloaded = {}
    for name, start in systems.items():
        with start() as url:
            unloaded[name] = measure_unloaded(
                url, workload, UNLOADED_SHARE * base_rps, ASSUMED_VOCAB
            )
    slo = Slo(
        ttft_s=max(one.ttft_s for one in unloaded.values()),
        tbt_s=max(one.tbt_s for one in unloaded.values()),
    )
    say(f"SLOs: TTFT {slo.ttft_s:.3g} s, TBT {1e3 * slo.tbt_s:.3g} ms; load 1 is {base_rps:.3g}/s")
    curves = {}
    for name, start in systems.items():
        with start() as url:
            curves[name] = list(_curve(name, url, workload, slo, base_rps, loads, seconds, say))
    return {
        "cluster": msgspec.to_builtins(cluster),
        "base_rps": base_rps,
        "slo": msgspec.to_builtins(slo),
        "unloaded_slo": {name: msgspec.to_builtins(one) for name, one in unloaded.items()},
        "curves": curves,
        "ratio_to_peer": _ratios(curves),
    }


def _curve(
    name: str,
    url: str,
    workload: LiveWorkload,
    slo: Slo,
    base_rps: float,
    loads: Sequence[float],
    seconds: float,
    say: Say,
) -> Iterator[dict[str, Any]]:
    for number, load in enumerate(loads):
        rows = workload.rows(load * base_rps, seconds)
        # Other tokens each time: what the last load left in the cache is of no use.
        figures = replay_rows(url, rows, workload.block_tokens, slo, ASSUMED_VOCAB, seed=number + 1)
        say(
            f"{name:<16} load {load:>4g}: {figures['requests']:>5} requests,"
            f" {figures['effective']:>5} effective ({figures['goodput_rps']:.3f}/s),"
            f" {figures['rejected']} rejected, {figures['failed']} failed, TTFT P90"
            f" {figures['ttft_s']['p90']:.3g} s, TBT P90 {1e3 * figures['tbt_s']['p90']:.3g} ms"
        )
        yield {"load": load, "rate_rps": load * base_rps} | figures


def _ratios(curves: dict[str, list[dict[str, Any]]]) -> dict[str, list[float | None]]:
    """Of effective requests, load by load; None where the peer has none."""
    peer = [point["effective"] for point in curves["vLLM"]]
    return {
        name: [
            point["effective"] / theirs if theirs else None
            for point, theirs in zip(points, peer, strict=True)
        ]
        for name, points in curves.items()
        if name != "vLLM"
    }


@contextmanager
def _ours(cluster: LiveCluster) -> Iterator[str]:
    with LocalServer(cluster.arguments()) as server:
        yield server.url


@contextmanager
def _theirs(peer: Peer, cluster: LiveCluster, workload: LiveWorkload) -> Iterator[str]:
    if peer.url:
        yield peer.url
        return
    longest_tokens = workload.longest_tokens or 8192
    with PeerServer(peer, cluster, longest_tokens) as server:
        yield server.url

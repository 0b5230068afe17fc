"""moonpool and vLLM on one machine under the same requests through HTTP, from light load to far
beyond capacity: how many requests a second meet both SLOs.

SLOs are the same for all systems: ten times the P90 of TTFT and five times the P90 of TBT of the
slowest system without load, so that no system has a tighter SLO than in the paper. The client is
ours, or vLLM's own benchmark client. Several vLLMs may take part: each load is judged by the best
of them. A vLLM that does not start is left out, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from benchmarks.suite.live.agreement import replay_rows, simulated_slo
from benchmarks.suite.live.overload import SIMULATED_S, UNLOADED_SHARE, measure_unloaded
from benchmarks.suite.live.vllm_client import run_vllm_client
from benchmarks.suite.live.vllm_shapes import WORDS, VllmTarget, start_peer
from moonpool.types import Slo
from moonpool_lab.demo.local_server import LocalServer, ServerError
from moonpool_lab.profiling.live_cluster import (
    LiveCluster,
    LiveWorkload,
    estimate_capacity,
    measure_live,
)
from moonpool_lab.replay.server import ASSUMED_VOCAB

Client = Literal["moonpool", "vllm"]
LONGEST_TOKENS = 8192
OURS = "moonpool"
JUDGED: dict[Client, tuple[str, ...]] = {
    "moonpool": ("effective",),
    "vllm": ("requests_per_s", "output_tokens_per_s", "goodput_rps"),
}
Say = Callable[[str], None]
Start = Callable[[], AbstractContextManager[str]]


class Access(NamedTuple):
    """How to call the server at `url`: with which key, and trusting which authority. Other servers
    need neither a key nor an authority."""

    url: str = ""
    api_key: str = ""
    ca_file: str = ""

    def to(self, url: str) -> dict[str, str]:
        """The arguments for the server at `url`."""
        return {"api_key": self.api_key, "ca_file": self.ca_file} if url == self.url else {}


OPEN = Access()


def bench_peers_live(
    cluster: LiveCluster,
    workload: LiveWorkload,
    peers: Sequence[VllmTarget],
    client: Client,
    slo: Slo | None,
    loads: Sequence[float],
    seconds: float,
    say: Say,
    access: Access = OPEN,
) -> dict[str, Any]:
    """Returns the curves by system. Loads are multiples of the simulated capacity of two colocated
    instances; `slo` replaces the measured SLO. `access` is to the peer that runs already. Raises
    what servers and replays raise."""
    split = cluster.with_(prefill=1, decode=1, mixed=0)
    mixed = cluster.with_(prefill=0, decode=0, mixed=2)
    with LocalServer(mixed.with_(admission="none").arguments()) as server:
        profile = measure_live(server.url, workload, say)
    rough = slo or simulated_slo(mixed, profile, workload)
    base_rps = estimate_capacity(mixed, profile, workload, SIMULATED_S, rough)
    longest_tokens = workload.longest_tokens or LONGEST_TOKENS
    theirs: dict[str, Start] = {
        name: lambda peer=peer: start_peer(peer, cluster, longest_tokens)  # type: ignore[misc]
        for name, peer in zip(peer_names(peers), peers, strict=True)
    }
    unloaded: dict[str, Slo] = {}
    absent: dict[str, str] = {}
    if slo is None:
        systems = {f"{OURS} {c.words}": _starter(c) for c in (split, mixed)} | theirs
        with closing(present(systems, absent, say)) as running:
            for name, url in running:
                unloaded[name] = _unloaded(name, url, workload, base_rps, say, access)
        slo = Slo(
            ttft_s=max(one.ttft_s for one in unloaded.values()),
            tbt_s=max(one.tbt_s for one in unloaded.values()),
        )
    say(f"SLOs: TTFT {slo.ttft_s:.3g} s, TBT {1e3 * slo.tbt_s:.3g} ms; load 1 is {base_rps:.3g}/s")
    ours = {f"{OURS} {c.words}": _starter(c.with_(slo=slo)) for c in (split, mixed)}
    run = _Run(
        workload, slo, client, next((p.python for p in peers if p.python), ""), cluster, access
    )
    curves = {}
    with closing(present(ours | theirs, absent, say)) as running:
        for name, url in running:
            curves[name] = list(run.curve(name, url, base_rps, loads, seconds, say))
    rivals = [name for name in theirs if name in curves]
    return {
        "cluster": msgspec.to_builtins(cluster),
        "client": client,
        "peers": msgspec.to_builtins(list(peers)),
        "base_rps": base_rps,
        "slo": msgspec.to_builtins(slo),
        "unloaded_slo": {name: msgspec.to_builtins(one) for name, one in unloaded.items()},
        "curves": curves,
        "absent": absent,
        "ratio_to_peer": {key: ratios(curves, rivals, key) for key in JUDGED[client]},
    }


def peer_names(peers: Sequence[VllmTarget]) -> list[str]:
    """Gives each peer a unique name, with the size of its step if several peers have the same
    shape."""
    shapes = [peer.shape for peer in peers]
    return [
        f"{WORDS[p.shape]} {p.batched_tokens}" if shapes.count(p.shape) > 1 else WORDS[p.shape]
        for p in peers
    ]


def ratios(
    curves: dict[str, list[dict[str, Any]]], peers: Sequence[str], key: str
) -> dict[str, list[float | None]]:
    """Returns the ratios to the best peer, load by load; None where no peer has any goodput.
    Returns nothing without peers."""
    if not peers:
        return {}
    best = [
        max(points) for points in zip(*([p[key] for p in curves[n]] for n in peers), strict=True)
    ]
    return {
        name: [
            point[key] / theirs if theirs else None
            for point, theirs in zip(points, best, strict=True)
        ]
        for name, points in curves.items()
        if name not in peers
    }


def present(
    systems: dict[str, Start], absent: dict[str, str], say: Say
) -> Generator[tuple[str, str], None, None]:
    """Yields name and URL of each system in turn, while it runs. A peer that does not start is
    noted in `absent`, and not tried again. If moonpool does not start, that is an error."""
    for name, start in systems.items():
        if name in absent:
            continue
        with ExitStack() as stack:
            try:
                url = stack.enter_context(start())
            except ServerError as error:
                if name.startswith(OURS):
                    raise
                absent[name] = str(error)
                say(f"{name:<24} left out: {error}")
                continue
            yield name, url


def _unloaded(
    name: str, url: str, workload: LiveWorkload, base_rps: float, say: Say, access: Access
) -> Slo:
    rate_rps, asked = UNLOADED_SHARE * base_rps, access.to(url)
    found = measure_unloaded(url, workload, rate_rps, ASSUMED_VOCAB, **asked)
    say(f"{name:<24} unloaded: SLOs {found.ttft_s:.3g} s and {1e3 * found.tbt_s:.3g} ms")
    return found


class _Run:
    """The requests that all systems get, and the client that sends them."""

    def __init__(
        self,
        workload: LiveWorkload,
        slo: Slo,
        client: Client,
        python: str,
        cluster: LiveCluster,
        access: Access,
    ) -> None:
        self._workload, self._slo, self._client = workload, slo, client
        self._python, self._folder, self._access = python, cluster.model, access

    def curve(
        self,
        name: str,
        url: str,
        base_rps: float,
        loads: Sequence[float],
        seconds: float,
        say: Say,
    ) -> Iterator[dict[str, Any]]:
        block_tokens = self._workload.block_tokens
        for number, load in enumerate(loads):
            rows = self._workload.rows(load * base_rps, seconds)
            # Draws other tokens each time, so that blocks cached under the last load are not
            # reused.
            seed = number + 1
            if self._client == "vllm":
                figures = run_vllm_client(
                    self._python, url, self._folder, rows, block_tokens, self._slo, seed
                )
            else:
                figures = replay_rows(
                    url,
                    rows,
                    block_tokens,
                    self._slo,
                    ASSUMED_VOCAB,
                    seed=seed,
                    **self._access.to(url),
                )
            say(f"{name:<24} load {load:>4g}: {_words(figures)}")
            yield {"load": load, "rate_rps": load * base_rps} | figures


def _words(figures: dict[str, Any]) -> str:
    latencies = (
        f"TTFT P90 {figures['ttft_s']['p90']:.3g} s, TBT P90 {1e3 * figures['tbt_s']['p90']:.3g} ms"
    )
    if "effective" in figures:
        return (
            f"{figures['requests']:>5} requests, {figures['effective']:>5} effective"
            f" ({figures['goodput_rps']:.3f}/s), {figures['rejected']} rejected,"
            f" {figures['failed']} failed, {latencies}"
        )
    return (
        f"{figures['completed']} of {figures['requests']} requests, {figures['requests_per_s']:.3g}"
        f" a second, {figures['output_tokens_per_s']:.4g} tokens/s, {figures['goodput_rps']:.3g} a"
        f" second within SLOs, {latencies}"
    )


def _starter(cluster: LiveCluster) -> Start:
    return lambda: _ours(cluster)


@contextmanager
def _ours(cluster: LiveCluster) -> Iterator[str]:
    with LocalServer(cluster.arguments()) as server:
        yield server.url

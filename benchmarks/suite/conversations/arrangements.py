"""Arrangements of one machine's cores by name: `1P+1D`, `2M/random`, `vllm-two:128`.

In a name, a placement or admission of moonpool follows a slash, and the most tokens of a step of
vLLM follow a colon. All arrangements have the same tokens of KVCache in sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec

from benchmarks.suite.live.vllm_shapes import SHAPES, Shape, VllmTarget, start_peer
from moonpool.config.tables import Admission, ConfigError, Placement, choices
from moonpool.types import Slo, Struct
from moonpool_lab.demo.local_server import LocalServer
from moonpool_lab.profiling.live_cluster import LiveCluster

PLANNED = "planned"
PEER = "vllm-"
GROUPS: dict[str, tuple[str, ...]] = {
    "arrangements": (
        *("1P+1D", "2M", "2P+2D", PLANNED),
        *("vllm-one", "vllm-two", "vllm-pair", "vllm-pool"),
    ),
    "placements": tuple(f"{cluster}/{p}" for cluster in ("2M", "4M") for p in choices(Placement)),
    "admissions": tuple(
        f"{cluster}/{admission}"
        for cluster in ("1P+1D", "2M")
        for admission in ("none", "early", "goodput")
    ),
}
"""Groups of arrangements that are compared with each other."""
_COUNTS = re.compile(r"(?:(?P<p>[1-9])P\+)?(?:(?P<d>[1-9])D\+?)?(?:(?P<m>[1-9])M)?")


class Machine(Struct, frozen=True):
    """The machine that the arrangements share. `peer_python`: the Python of a vLLM installation, or
    "" without one."""

    model: str
    kv_tokens: int = 65_536
    block_tokens: int = 32
    chunk_tokens: int = 512
    peer_chunk_tokens: int = 512
    longest_tokens: int = 4096
    peer_python: str = ""
    peer_eager: bool = False


class LiveArrangement(Struct, frozen=True):
    """A parsed name. `shape` "" means moonpool."""

    name: str
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    placement: Placement = "kvcache-centric"
    admission: Admission = "goodput"
    shape: Shape | None = None
    batched_tokens: int = 0

    @property
    def knows_hits(self) -> bool:
        """Whether all that the system reports as cached was cached, and not just fetched from its
        prefill."""
        return self.shape != "pair"

    @property
    def forgets(self) -> bool:
        """Whether a reset restores the system's first state: it learns nothing, and keeps no blocks
        elsewhere."""
        return self.shape in ("one", "two", "pair")

    def cluster(self, machine: Machine, slo: Slo) -> LiveCluster:
        return LiveCluster(
            model=machine.model,
            prefill=self.prefill,
            decode=self.decode,
            mixed=self.mixed,
            kv_tokens=machine.kv_tokens // max(self.prefill + self.decode + self.mixed, 1),
            block_tokens=machine.block_tokens,
            chunk_tokens=machine.chunk_tokens,
            admission=self.admission,
            slo=slo,
        )


def parse_arrangement(name: str) -> LiveArrangement:
    """Raises ConfigError."""
    if name.startswith(PEER):
        shape, _, tokens = name.removeprefix(PEER).partition(":")
        if shape in SHAPES and (not tokens or tokens.isdecimal()):
            return LiveArrangement(name, shape=shape, batched_tokens=int(tokens or 0))
        raise ConfigError(f"{name}: use vllm- and {', '.join(SHAPES)}, such as vllm-two:128")
    counts, *policies = name.split("/")
    found = _COUNTS.fullmatch(counts)
    if not counts or found is None or bool(found["p"]) > bool(found["d"] or found["m"]):
        raise ConfigError(
            f"{name}: an arrangement is 1P+1D, 2M, 1P+1D+1M and the like, vllm-one, or {PLANNED}"
        )
    prefill, decode, mixed = (int(found[key] or 0) for key in "pdm")
    arrangement = LiveArrangement(name, prefill, decode, mixed)
    for policy in policies:
        key = next(
            (
                key
                for key, kind in (("placement", Placement), ("admission", Admission))
                if policy in choices(kind)
            ),
            None,
        )
        if key is None:
            raise ConfigError(
                f"{name}: after / stands a placement ({', '.join(choices(Placement))}) or an"
                f" admission ({', '.join(choices(Admission))})"
            )
        arrangement = msgspec.structs.replace(arrangement, **{key: policy})
    return arrangement


def start_arrangement(
    arrangement: LiveArrangement, machine: Machine, slo: Slo
) -> AbstractContextManager[str]:
    """Starts the arrangement for a `with` block, and gives the URL at which it answers. Raises
    ServerError."""
    cluster = arrangement.cluster(machine, slo)
    if arrangement.shape is None:
        return _ours(cluster, arrangement.placement)
    processes = 1 if arrangement.shape == "one" else 2
    peer = VllmTarget(
        python=machine.peer_python,
        eager=machine.peer_eager,
        shape=arrangement.shape,
        batched_tokens=arrangement.batched_tokens or machine.peer_chunk_tokens,
        kv_tokens=machine.kv_tokens // processes,
    )
    return start_peer(peer, cluster, machine.longest_tokens)


@contextmanager
def _ours(cluster: LiveCluster, placement: Placement) -> Iterator[str]:
    with LocalServer([*cluster.arguments(), "--placement", placement]) as server:
        yield server.url

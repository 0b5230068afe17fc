"""Assigns this machine's cores to processes: disjoint sets, each within one NUMA node.

Reads the kernel's limits (affinity, cgroup quota, topology) and pins threads. A thread's children
inherit its cores, so pinning the computing thread also pins its OpenMP threads. Memory is placed by
first touch: threads that write an instance's blocks run on the instance's node. Nothing is pinned
if the topology is unknown, or there are too few cores.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from moonpool.config.tables import Config
from moonpool.types import Struct

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")

log = logging.getLogger("moonpool.cores")

MOST_THREADS_PER_CORE = 4
"""More threads per core than this are likely a mistake. A small cluster may well be tried on few
cores, because the instances of a cluster seldom compute at the same time."""


class Core(Struct, frozen=True, order=True):
    """A logical CPU of this machine. `sibling`: 0 for the first logical CPU of a physical core."""

    node: int
    sibling: int
    number: int


class CoreShare(Struct, frozen=True):
    """The cores of one process: of its engine, and of its other threads. Empty `cores` mean any
    core."""

    engine: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


def usable_cores() -> int:
    """Returns how many cores this process may use, by its affinity and its cgroup's quota."""
    quota = _quota_cores()
    allowed = len(_allowed())
    return allowed if quota >= allowed else max(int(quota), 1)


def threads_per_process(config: Config) -> int:
    """Returns the configured threads, or else an equal share of this machine's cores."""
    processes = config.cluster.num_processes(config.engine)
    return config.engine.threads or max(1, usable_cores() // processes)


def crowding(config: Config, cores: int) -> str:
    """Returns a warning if the engines of a local cluster have far more threads than `cores`.
    Returns "" if they have not, or if they run on other hardware."""
    if config.engine.kind == "vllm" or config.engine.device == "cuda":
        return ""
    processes = config.cluster.num_processes(config.engine)
    threads = config.engine.threads or max(1, cores // processes)
    if processes * threads <= MOST_THREADS_PER_CORE * cores:
        return ""
    return (
        f"{processes} engine processes of {threads} threads each share {cores} cores, so each step"
        " waits for the others: start fewer instances, or give fewer --threads"
    )


def read_cores() -> list[Core]:
    """Returns the cores that this process may run on."""
    allowed = _allowed()
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in sorted(NODES.glob("node[0-9]*"))
        for number in _numbers(folder / "cpulist")
    }
    cores = []
    for number in sorted(allowed):
        sharing = _numbers(CPUS / f"cpu{number}" / "topology" / "thread_siblings_list")
        here = [other for other in sharing if other in allowed]
        sibling = here.index(number) if number in here else 0
        cores.append(Core(nodes.get(number, 0), sibling, number))
    return cores


def share_cores(cores: Sequence[Core], wanted: Sequence[int], usable: int) -> list[CoreShare]:
    """Returns the cores of processes with `wanted` threads each, or [] if there are too few cores.

    A process gets cores of one node if a node has enough left, physical cores first. Other threads
    of the process get the cores without an engine, of the same node if possible, or else all cores.
    """
    if sum(wanted) > min(len(cores), usable):
        return []
    nodes: dict[int, list[int]] = {}
    for core in sorted(cores):
        nodes.setdefault(core.node, []).append(core.number)
    node_of = {core.number: core.node for core in cores}
    taken: list[tuple[int, ...]] = []
    for threads in wanted:
        fullest = max(nodes.values(), key=len)
        source = fullest if len(fullest) >= threads else [n for own in nodes.values() for n in own]
        chosen = tuple(source[:threads])
        for own in nodes.values():
            own[:] = [number for number in own if number not in chosen]
        taken.append(chosen)
    left = [number for own in nodes.values() for number in own]
    shares = []
    for chosen in taken:
        home = {node_of[number] for number in chosen}
        near = tuple(number for number in left if node_of[number] in home)
        everything = tuple(sorted(node_of))
        shares.append(CoreShare(chosen, near or tuple(left) or everything))
    return shares


def pin_thread(cores: Iterable[int]) -> None:
    """Pins the calling thread and its future children. Does nothing if the system refuses."""
    numbers = set(cores)
    if not numbers or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, numbers)
    except OSError as error:
        log.info("not pinned to cores %s: %s", sorted(numbers), error.strerror)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parses the kernel's notation: "0-2,5" is (0, 1, 2, 5). Raises ValueError."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def format_cores(cores: Sequence[int]) -> str:
    """Returns the cores in a notation that `parse_cores` reads."""
    return ",".join(map(str, cores))


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _quota_cores() -> float:
    """Returns the quota of the cgroup that this process sees as its root, as in a container."""
    try:
        quota, period = QUOTA.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def _numbers(path: Path) -> tuple[int, ...]:
    try:
        return parse_cores(path.read_text())
    except (OSError, ValueError):
        return ()


_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))
_FORMATS = (("avx512_bf16", "bfloat16"), ("bf16", "bfloat16"), ("i8mm", "i8mm"))


def cpu_name() -> str:
    """The CPU model as the operating system reports it, with the instructions that matter to the
    kernels: clouds give unlike CPUs one name."""
    try:
        return name_cpu(Path("/proc/cpuinfo").read_text())
    except OSError:  # not Linux
        return platform.processor() or "unknown CPU"


def cpu_flags() -> frozenset[str]:
    """Returns the features of the CPU, by the kernel's names, or none without /proc/cpuinfo."""
    try:
        return _flags(_first_values(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return frozenset()


def name_cpu(cpuinfo: str) -> str:
    """Returns `cpu_name` from the text of /proc/cpuinfo."""
    found = _first_values(cpuinfo)
    model, flags = found.get("model name") or platform.processor() or "unknown CPU", _flags(found)
    vectors = next((word for flag, word in _VECTORS if flag in flags), "")
    formats = [word for flag, word in _FORMATS if flag in flags]
    return f"{model} ({', '.join(filter(None, [vectors, *formats]))})" if vectors else model


def _first_values(cpuinfo: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, text = line.partition(":")
        found.setdefault(name.strip(), text.strip())
    return found


def _flags(values: dict[str, str]) -> frozenset[str]:
    return frozenset((values.get("flags") or values.get("Features") or "").split())

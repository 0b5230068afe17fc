"""Memory, CPU time and wake-ups of a cluster that serves nothing.

Memory is the proportional set size of each process (PSS: a page that n processes share counts 1/n
in each of them), so the sum is the memory that the cluster takes from the machine. KVCache is
memory of files (shmem), everything else is not, so the kernel tells both apart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from moonpool_lab.demo.local_server import LocalServer

PROC = Path("/proc")
SETTLE_S = 60.0
"""Longest time to wait for the start-up's work to end."""
SETTLE_STEP_S = 2.0
SETTLED_CORES = 0.03
_MIB = 1 << 20
Say = Callable[[str], None]


def bench_idle(
    model: str, prefill: int, decode: int, flags: list[str], seconds: float, say: Say
) -> dict[str, Any]:
    """Measures MiB, percent of a core and wake-ups of each process, and their sums. Raises
    BenchError."""
    line = [model, "--prefill", str(prefill), "--decode", str(decode), *flags]
    with LocalServer(line) as server:
        try:
            settled = _settle(server.pid)
            pids = dict(sorted(family(server.pid).items(), key=lambda each: each[1]))
            measured = _measure(pids, seconds)
        except OSError as error:
            raise BenchError(f"a process ended: {error}; {server.last_words()}") from None
    keys = ("memory_mib", "kvcache_mib", "cpu_percent", "wakeups_per_s")
    total = {key: sum(figures[key] for figures in measured.values()) for key in keys}
    say("process          PSS MiB   KVCache MiB   % of a core   wake-ups/s")
    for name, row in [*((pids[pid], row) for pid, row in measured.items()), ("sum", total)]:
        say(
            f"{name:<14} {row['memory_mib']:9.1f} {row['kvcache_mib']:13.1f}"
            f" {row['cpu_percent']:13.3f} {row['wakeups_per_s']:12.2f}"
        )
    both_mb = (total["memory_mib"] + total["kvcache_mib"]) * _MIB / 1e6
    say(f"{both_mb:.0f} MB in all")
    return {
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "flags": flags,
        "seconds": seconds,
        "settled": settled,
        "processes": [{"process": pids[pid], **figures} for pid, figures in measured.items()],
        "sum": total | {"all_mb": both_mb},
    }


def family(pid: int) -> dict[int, str]:
    """Names of a process and all its descendants by process id."""
    parents = dict(_parents())
    found = {pid: "supervisor"}
    while more := {p for p, above in parents.items() if above in found} - found.keys():
        found |= {p: _name(p) for p in more}
    return found


def memory_bytes(pid: int) -> tuple[int, int]:
    """Proportional bytes of a process: without memory files, and of memory files."""
    text = (PROC / str(pid) / "smaps_rollup").read_text()
    sizes = {key: int(kib) * 1024 for key, kib in re.findall(r"^(Pss\w*):\s+(\d+) kB", text, re.M)}
    return sizes["Pss"] - sizes["Pss_Shmem"], sizes["Pss_Shmem"]


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process's living threads: in units of 1 ns if the kernel reports
    them, else in clock ticks (10 ms)."""
    try:
        times = [(task / "schedstat").read_text() for task in _tasks(pid)]
        return sum(int(text.split()[0]) for text in times) / 1e9
    except FileNotFoundError:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_wakeups(pid: int) -> int:
    """How often the threads of a process have waited, which are its wake-ups."""
    texts = [(task / "status").read_text() for task in _tasks(pid)]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", t, re.M)[0]) for t in texts)


def _tasks(pid: int) -> list[Path]:
    return list((PROC / str(pid) / "task").iterdir())


def _measure(pids: dict[int, str], seconds: float) -> dict[int, dict[str, float]]:
    before = {pid: (cpu_s(pid), num_wakeups(pid)) for pid in pids}
    began_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    found = {}
    for pid in pids:
        own, arena = memory_bytes(pid)
        found[pid] = {
            "memory_mib": own / _MIB,
            "kvcache_mib": arena / _MIB,
            "cpu_percent": 100 * (cpu_s(pid) - before[pid][0]) / took_s,
            "wakeups_per_s": (num_wakeups(pid) - before[pid][1]) / took_s,
        }
    return found


def _settle(pid: int) -> bool:
    """Waits until the start-up's work has ended. Returns whether it did in time.

    If processes of the start-up end in between, the next step decides.
    """
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        pids = family(pid)
        try:
            before = sum(cpu_s(each) for each in pids)
            time.sleep(SETTLE_STEP_S)
            spent = sum(cpu_s(each) for each in pids) - before
        except OSError:
            continue
        if spent < SETTLED_CORES * SETTLE_STEP_S and family(pid).keys() == pids.keys():
            return True
    return False


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue  # the process has ended
            yield int(folder.name), int(stat.rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended"
    if "head-process" in line:
        return "head"
    named = re.search(r"--name (\S+)", line)
    return named.group(1) if named else line.removeprefix("moonpool ") or str(pid)

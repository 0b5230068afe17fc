"""Measures a large prefix index of the Conductor: bytes per block, and microseconds to match a
prompt, against limits.

Memory is counted twice, each time in a process of its own: what the process grows by (resident
set), and what Python allocated (tracemalloc, which slows everything and is never timed). The keys
in the index are separate copies, like keys received from a socket, and are counted.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.errors import BenchError
from moonpool.distributions import nearest_rank
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.types import BlockKey, InstanceId

LIMIT_BLOCK_BYTES = 300.0
LIMIT_MATCH_US = 100.0
PROMPT_BLOCKS = 256
EVENT_BLOCKS = 64
"""Names in one announcement."""
SHARED_PREFIXES = 0.2
"""Share of the prompts that two instances hold."""
MATCHES = 400
ROUNDS = 5
SSD_SHARES = (0.0, 0.8)
"""Shares of the blocks that lie on an SSD only."""


def bench_index(blocks: int, instances: int, echo: Callable[[str], None]) -> dict[str, Any]:
    """Returns one row for each share of the SSD. Raises BenchError."""
    rows = []
    for ssd_share in SSD_SHARES:
        timed = _apart("rss", blocks, instances, ssd_share)
        traced = _apart("tracemalloc", blocks, instances, ssd_share)
        row = {"ssd_share": ssd_share, **timed, "traced_block_bytes": traced["block_bytes"]}
        most = max(row["block_bytes"], row["traced_block_bytes"])
        row["within_limits"] = most < LIMIT_BLOCK_BYTES and row["match_us"] < LIMIT_MATCH_US
        rows.append(row)
        echo(
            f"{blocks:,} blocks, {instances:,} instances, {ssd_share:.0%} on SSD only:"
            f" {row['block_bytes']:.0f} bytes a block resident, {row['traced_block_bytes']:.0f}"
            f" allocated (limit {LIMIT_BLOCK_BYTES:.0f}); match of {PROMPT_BLOCKS} blocks"
            f" {row['match_us']:.1f} us, P99 {row['match_p99_us']:.1f} (limit"
            f" {LIMIT_MATCH_US:.0f}), a prompt nobody knows {row['miss_us']:.1f};"
            f" an announced block {row['event_us']:.2f} us"
        )
    return {
        "blocks": blocks,
        "instances": instances,
        "limits": {"block_bytes": LIMIT_BLOCK_BYTES, "match_us": LIMIT_MATCH_US},
        "rows": rows,
    }


def _apart(how: str, blocks: int, instances: int, ssd_share: float) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, how, str(blocks), str(instances), str(ssd_share)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{blocks} blocks, {instances} instances: {(last or ['killed'])[0]}")
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def run_one(how: str, blocks: int, instances: int, ssd_share: float) -> dict[str, Any]:
    """Runs in this process, whose memory must not have grown before."""
    rng = random.Random(0)
    prompts = list(_prompts(blocks))
    held = _who_holds(len(prompts), instances, rng)
    gc.collect()
    if how == "tracemalloc":
        tracemalloc.start()
    before = _memory_bytes(how)
    began_s = time.perf_counter()
    index = PrefixIndex()
    num_events = 0
    for number, places in enumerate(held):
        num_events += _announce(index, number, [prompts[p] for p in places], ssd_share)
    seconds = time.perf_counter() - began_s
    gc.collect()
    grown = _memory_bytes(how) - before
    found: dict[str, Any] = {
        "held_blocks": len(index),
        "block_bytes": round(grown / len(index), 1),
    }
    if how == "tracemalloc":
        tracemalloc.stop()
        return found
    found["event_us"] = round(seconds / max(num_events, 1) * 1e6, 3)
    return found | _match_times(index, prompts, rng)


def _prompts(blocks: int) -> Iterator[list[BlockKey]]:
    for first in range(0, blocks, PROMPT_BLOCKS):
        numbers = range(first, min(first + PROMPT_BLOCKS, blocks))
        yield [BlockKey(hashlib.sha256(str(n).encode()).digest()[:16]) for n in numbers]


def _who_holds(num_prompts: int, instances: int, rng: random.Random) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(instances)]
    for prompt in range(num_prompts):
        holders = 2 if rng.random() < SHARED_PREFIXES and instances > 1 else 1
        for number in rng.sample(range(instances), holders):
            held[number].append(prompt)
    return held


def _announce(
    index: PrefixIndex, number: int, prompts: list[list[BlockKey]], ssd_share: float
) -> int:
    """Announces as an instance does: an empty snapshot, then event after event. Returns the
    announced names."""
    name = InstanceId(f"instance-{number}")
    index.add_instance(name, number)
    index.load_snapshot(name, number, 0, ())
    keys = [key for prompt in prompts for key in prompt]
    for sequence, start in enumerate(range(0, len(keys), EVENT_BLOCKS)):
        event = [BlockKey(bytes(bytearray(key))) for key in keys[start : start + EVENT_BLOCKS]]
        on_ssd = event[: round(len(event) * ssd_share)]
        if not index.apply(name, number, sequence, event[len(on_ssd) :], (), on_ssd):
            raise BenchError(f"the index distrusts {name}")
    return len(keys)


def _match_times(
    index: PrefixIndex, prompts: list[list[BlockKey]], rng: random.Random
) -> dict[str, float]:
    """Times each prompt by the best of a few rounds, so that a busy machine's other work does not
    count; mean and P99 are over the prompts."""
    whole = [prompt for prompt in prompts if len(prompt) == PROMPT_BLOCKS] or prompts
    drawn = [rng.choice(whole) for _ in range(MATCHES)]
    unknown = [[BlockKey(key[::-1]) for key in prompt] for prompt in drawn[:50]]
    best = sorted(min(column) for column in zip(*_rounds(index, drawn), strict=True))
    misses = [min(column) for column in zip(*_rounds(index, unknown), strict=True)]
    return {
        "match_us": round(statistics.fmean(best), 2),
        "match_p99_us": round(nearest_rank(best, 0.99), 2),
        "miss_us": round(statistics.fmean(misses), 2),
    }


def _rounds(index: PrefixIndex, prompts: list[list[BlockKey]]) -> list[list[float]]:
    return [[_match_us(index, prompt) for prompt in prompts] for _ in range(ROUNDS)]


def _match_us(index: PrefixIndex, keys: list[BlockKey]) -> float:
    began_ns = time.perf_counter_ns()
    index.match(keys)
    return (time.perf_counter_ns() - began_ns) / 1e3


def _memory_bytes(how: str) -> int:
    if how == "tracemalloc":
        return tracemalloc.get_traced_memory()[0]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _how, _blocks, _instances, _share = sys.argv[1:]
    _found = run_one(_how, int(_blocks), int(_instances), float(_share))
    sys.stdout.write(msgspec.json.encode(_found).decode())

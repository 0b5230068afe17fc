"""Measures layer-wise load and store (Mooncake 5.2) on this machine: a prefix is loaded from
another process, the SSD or a Mooncake Store while the rest of the prompt is computed, and a prompt
is stored in another process while it is computed. Each way is compared with the same work without
overlap.

Each round runs every way once, so that a busy moment affects all ways. The figures are medians over
the rounds. The cost of storing is the difference within a round to the same prompt without storing.
The slope of a line through these costs over the prompt's length, with its error, shows whether the
cost grows with the length.

Load and computation share the CPUs even if they overlap. So the total time is at least the longest
of three times: the load, the computation, and the CPU time of both, including the peer's, divided
by the number of CPUs. The last of these times is the row's `cpu_bound`.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.pool.layers_local import LayerwiseInstance
from benchmarks.suite.pool.layers_remote import ExpectTransfer, run_far
from benchmarks.suite.pool.theil_sen import slope
from moonpool.config.tables import MooncakeConfig
from moonpool.gc_tuning import settle_threads
from moonpool.protocol.messages import PrefixSource
from moonpool.protocol.transfer_events import PeerAddress
from moonpool_engine.storage.mooncake import MooncakeStore
from moonpool_engine.storage.store import open_store

DEFAULT_MODEL = "random:hidden=512,layers=16,heads=8,kv_heads=8,inter=1024"
"""This model has much KVCache for its arithmetic, 32 KiB a token, as large models on few devices
have."""
TRANSPORTS = ("shm", "tcp")
WAYS = ("none", "layer_wise", "after")
Say = Callable[[str], None]
_ALL_THREADS = 2
"""The lowest bits of the number of the clock of a process's CPU time; the bits above are the
inverted process id."""


def bench_layers(
    model: str,
    prefixes: Sequence[int],
    new_tokens: int,
    prompts: Sequence[int],
    rounds: int,
    say: Say,
    folder: Path | None = None,
    mooncake: str = "",
) -> dict[str, Any]:
    """Returns the seconds of loading by source and prefix, and of storing by transport and prompt.
    `mooncake`: a master's address. Raises BenchError, ArenaError, StoreError."""
    settle_threads()
    found: dict[str, Any] = {"model": model, "new_tokens": new_tokens, "rounds": rounds}
    longest = max([p + new_tokens for p in prefixes] + list(prompts))
    size = (model, 2 * longest + 1024, max(512, new_tokens))
    if prefixes:
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder) as name:
            found["ssd"] = {"load": _stored(size, prefixes, new_tokens, rounds, name, "")}
            _tell_loads("ssd", found, say)
        if mooncake:
            found["mooncake"] = {"load": _stored(size, prefixes, new_tokens, rounds, "", mooncake)}
            _tell_loads("mooncake", found, say)
    for transport in TRANSPORTS:
        far = LayerwisePair(size, transport == "shm")
        try:
            loads = {str(n): _fetched(far, n, new_tokens, rounds) for n in prefixes}
            found[transport] = {"load": loads, "store": _stores(far, prompts, rounds)}
        finally:
            far.close()
        if prefixes:
            _tell_loads(transport, found, say)
        if prompts:
            _tell_stores(transport, found, say)
    return found


class LayerwisePair:
    """Both processes: the instance, and the peer that stores and serves blocks."""

    def __init__(self, size: tuple[str, int, int], shared_memory: bool) -> None:
        self.near = LayerwiseInstance(*size, shared_memory)
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=run_far, args=(there, self.near.layout, self.near.num_blocks, shared_memory)
        )
        self._process.start()
        there.close()
        self.address: PeerAddress = self._pipe.recv()

    def expect(self, stream_id: str, num_blocks: int) -> None:
        self._pipe.send(ExpectTransfer(stream_id, num_blocks))
        self._pipe.recv()

    def cpu_s(self) -> float:
        """Returns the CPU seconds of both processes so far."""
        assert self._process.pid is not None
        there = time.clock_gettime(~self._process.pid << 3 | _ALL_THREADS)
        return time.process_time() + there

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.near.close()


def _fetched(
    far: LayerwisePair, prefix_tokens: int, new_tokens: int, rounds: int
) -> dict[str, Any]:
    near = far.near
    fetch = PrefixSource(far.address, near.layout.blocks_for(prefix_tokens))
    tokens = near.tokens(prefix_tokens)
    return _loads(near, tokens, new_tokens, rounds, far.cpu_s, fetch=fetch)


def _stored(
    size: tuple[str, int, int],
    prefixes: Sequence[int],
    new_tokens: int,
    rounds: int,
    folder: str,
    mooncake: str,
) -> dict[str, Any]:
    near = LayerwiseInstance(*size, shared_memory=True)
    try:
        if mooncake:
            config = MooncakeConfig(master_server_address=mooncake)
            near.use_store(lambda arena, post: MooncakeStore(arena, config, "127.0.0.1", post))
        else:
            blocks = near.layout.blocks_for(max(prefixes))
            root = Path(folder)
            near.use_store(lambda arena, post: open_store(root, "near", arena, blocks, post))
        rows = {}
        for count in prefixes:
            prefix = near.tokens(count)
            near.put(prefix)
            rows[str(count)] = _loads(near, prefix, new_tokens, rounds, time.process_time)
        return rows
    finally:
        near.close()


def _loads(
    near: LayerwiseInstance,
    prefix: list[int],
    new_tokens: int,
    rounds: int,
    cpu_s: Callable[[], float],
    **where: Any,
) -> dict[str, Any]:
    """The serial run gives the time of a load alone. For the time of computing alone, the prefix is
    in the instance's own cache."""

    def run(layer_wise: bool) -> dict[str, float]:
        near.begin(layer_wise)
        began_s = cpu_s()
        took = near.prefill(prefix + near.tokens(new_tokens), True, **where)
        spent_s = cpu_s() - began_s
        alone = near.prefill(prefix + near.tokens(new_tokens), False)
        return {"all": took.prefill_s, "load": took.load_s, "compute": alone.prefill_s} | {
            "early": float(took.early),
            "cpu": spent_s,
        }

    names = ("compute", "load", "cpu_bound", "serial", "overlapped", "ratio", "serial_ratio")
    num_cpus = len(os.sched_getaffinity(0))
    taken: dict[str, list[float]] = {name: [] for name in names}
    early = 0.0
    for number in range(rounds + 1):
        ways = (False, True) if number % 2 else (True, False)
        ran = {layer_wise: run(layer_wise) for layer_wise in ways}
        if not number:  # the first round connects the processes and touches the memory
            continue
        serial, overlapped = ran[False], ran[True]
        early += overlapped["early"]
        compute_s = statistics.mean((serial["compute"], overlapped["compute"]))
        limit_s = max(compute_s, serial["load"])
        taken["compute"].append(compute_s)
        taken["load"].append(serial["load"])
        taken["cpu_bound"].append(serial["cpu"] / num_cpus)
        taken["serial"].append(serial["all"])
        taken["overlapped"].append(overlapped["all"])
        taken["ratio"].append(overlapped["all"] / limit_s)
        taken["serial_ratio"].append(serial["all"] / limit_s)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {**medians, "began_early": early / rounds, "all": taken}


def _stores(far: LayerwisePair, prompts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the seconds until a prompt is computed and, where it is stored, until all of it is
    stored. All lengths and ways take turns."""
    taken = {count: {way: [0.0] * 0 for way in WAYS} for count in prompts}
    for number in range(rounds + 1):
        first = number % len(WAYS)
        for count in prompts:
            for way in WAYS[first:] + WAYS[:first]:
                seconds = _store(far, count, way)
                if number:
                    taken[count][way].append(seconds)
    rows: dict[str, Any] = {str(count): _costs(ways) for count, ways in taken.items()}
    if len(prompts) > 1:
        rows["growth"] = {
            way: slope(
                [(count, cost) for count in prompts for cost in rows[str(count)]["costs"][way]]
            )
            for way in WAYS[1:]
        }
    return rows


def _store(far: LayerwisePair, num_tokens: int, way: str) -> float:
    near = far.near
    near.begin(False, layer_wise_store=way == "layer_wise")
    tokens = near.tokens(num_tokens)
    if way == "none":
        return near.prefill(tokens, False).prefill_s
    far.expect(near.next_work_id, near.layout.blocks_for(num_tokens))
    return near.prefill(tokens, False, target=far.address).stored_s


def _costs(taken: dict[str, list[float]]) -> dict[str, Any]:
    medians = {way: statistics.median(values) for way, values in taken.items()}
    costs = {
        way: [stored - none for stored, none in zip(taken[way], taken["none"], strict=True)]
        for way in WAYS[1:]
    }
    found = {f"{way}_cost": statistics.median(values) for way, values in costs.items()}
    return {**medians, **found, "costs": costs, "all": taken}


def _tell_loads(way: str, found: dict[str, Any], say: Say) -> None:
    say(f"load by {way}, then {found['new_tokens']} tokens: ms")
    say("  prefix  compute    load  CPU bound  serial  overlapped  of max(load, compute): both")
    for prefix, row in found[way]["load"].items():
        names = ("compute", "load", "cpu_bound", "serial", "overlapped")
        each = [1e3 * row[name] for name in names]
        say(
            f"  {prefix:>6s}{each[0]:9.1f}{each[1]:8.1f}{each[2]:11.1f}"
            f"{each[3]:8.1f}{each[4]:12.1f}{row['serial_ratio']:22.2f}{row['ratio']:7.2f}"
        )


def _tell_stores(way: str, found: dict[str, Any], say: Say) -> None:
    say(f"store by {way}: ms")
    say("  prompt  without  layer-wise   after it    cost: layer-wise, after")
    for prompt, row in found[way]["store"].items():
        if prompt == "growth":
            for name, (grows_s, error_s) in row.items():
                say(
                    f"  cost {name.replace('_', '-')}: {1e6 * grows_s:+.1f}"
                    f" +- {1e6 * error_s:.1f} ms for each 1,000 tokens"
                )
            continue
        each = [1e3 * row[name] for name in WAYS]
        costs = [1e3 * row[f"{name}_cost"] for name in WAYS[1:]]
        say(
            f"  {prompt:>6s}{each[0]:9.1f}{each[1]:12.1f}{each[2]:11.1f}"
            f"{costs[0]:16.1f}{costs[1]:7.1f}"
        )

"""Layer-wise load and store (Mooncake 5.2) as this machine does it: a prefix that comes from
another process while the rest of the prompt is computed, and a prompt stored in another process
while it is computed; beside the same one after the other.

Each round runs every way once, so that a busy moment hits all alike; medians over the rounds.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.bench.layers_far import Take, run_far
from moonpool.bench.layers_near import Near
from moonpool.kvcache.transfers import PeerAddress
from moonpool.workers.messages import Fetch

DEFAULT_MODEL = "random:hidden=512,layers=16,heads=8,kv_heads=8,inter=1024"
"""Much KVCache for its arithmetic, as large models with few devices have: 32 KiB a token."""
TRANSPORTS = ("shm", "tcp")
Say = Callable[[str], None]


def bench_layers(
    model: str,
    prefixes: Sequence[int],
    new_tokens: int,
    prompts: Sequence[int],
    rounds: int,
    say: Say,
) -> dict[str, Any]:
    """Seconds of loading by transport and prefix, and of storing by transport and prompt. Raises
    LayersBenchError, ArenaError."""
    found: dict[str, Any] = {"model": model, "new_tokens": new_tokens, "rounds": rounds}
    longest = max([p + new_tokens for p in prefixes] + list(prompts))
    for transport in TRANSPORTS:
        far = _Far(model, 2 * longest + 1024, new_tokens, transport == "shm")
        try:
            loads = {str(n): _loads(far, n, new_tokens, rounds) for n in prefixes}
            stores = {str(n): _stores(far, n, rounds) for n in prompts}
            found[transport] = {"load": loads, "store": stores}
        finally:
            far.close()
    _tell(found, say)
    return found


class _Far:
    """Both processes."""

    def __init__(self, model: str, tokens: int, new_tokens: int, shared_memory: bool) -> None:
        self.near = Near(model, tokens, max(512, new_tokens), shared_memory)
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=run_far, args=(there, self.near.layout, self.near.num_blocks, shared_memory)
        )
        self._process.start()
        there.close()
        self.address: PeerAddress = self._pipe.recv()

    def expect(self, stream_id: str, num_blocks: int) -> None:
        self._pipe.send(Take(stream_id, num_blocks))
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.near.close()


def _loads(far: _Far, prefix_tokens: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    near = far.near
    fetch = Fetch(far.address, near.layout.blocks_for(prefix_tokens))
    prefix = near.tokens(prefix_tokens)

    def run(layer_wise: bool) -> dict[str, float]:
        near.begin(layer_wise)
        took = near.prefill(prefix + near.tokens(new_tokens), True, fetch=fetch)
        alone = near.prefill(prefix + near.tokens(new_tokens), False)
        return {"all": took.prefill_s, "load": took.load_s, "compute": alone.prefill_s} | {
            "early": float(took.early)
        }

    return _overlap(run, rounds)


def _overlap(run: Callable[[bool], dict[str, float]], rounds: int) -> dict[str, Any]:
    """Load alone is the load of the serial run; compute alone has the prefix in its own cache."""
    taken: dict[str, list[float]] = {
        name: [] for name in ("compute", "load", "serial", "overlapped", "ratio", "serial_ratio")
    }
    early = 0.0
    for number in range(rounds + 1):
        serial, overlapped = run(False), run(True)
        if not number:  # connects, and touches memory
            continue
        early += overlapped["early"]
        compute_s = statistics.mean((serial["compute"], overlapped["compute"]))
        limit_s = max(compute_s, serial["load"])
        taken["compute"].append(compute_s)
        taken["load"].append(serial["load"])
        taken["serial"].append(serial["all"])
        taken["overlapped"].append(overlapped["all"])
        taken["ratio"].append(overlapped["all"] / limit_s)
        taken["serial_ratio"].append(serial["all"] / limit_s)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {**medians, "began_early": early / rounds, "all": taken}


def _stores(far: _Far, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds until the prompt is computed and, where it is stored, all of it is there."""
    near = far.near
    taken: dict[str, list[float]] = {name: [] for name in ("none", "layer_wise", "after")}
    for number in range(rounds + 1):
        near.begin(False)
        none_s = near.prefill(near.tokens(num_tokens), False).prefill_s
        stored = {}
        for name in ("layer_wise", "after"):
            near.begin(False, layer_wise_store=name == "layer_wise")
            tokens = near.tokens(num_tokens)
            far.expect(near.next_work_id, near.layout.blocks_for(num_tokens))
            stored[name] = near.prefill(tokens, False, target=far.address).stored_s
        if number:
            taken["none"].append(none_s)
            for name, seconds in stored.items():
                taken[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    costs = {
        f"{name}_cost": statistics.median(
            stored - none for stored, none in zip(taken[name], taken["none"], strict=True)
        )
        for name in ("layer_wise", "after")
    }
    return {**medians, **costs, "all": taken}


def _tell(found: dict[str, Any], say: Say) -> None:
    for way in TRANSPORTS:
        say(f"load by {way}, then {found['new_tokens']} tokens: ms")
        say("  prefix  compute    load  serial  overlapped   of max(load, compute): serial, ours")
        for prefix, row in found[way]["load"].items():
            each = [1e3 * row[name] for name in ("compute", "load", "serial", "overlapped")]
            say(
                f"  {prefix:>6s}{each[0]:9.1f}{each[1]:8.1f}{each[2]:8.1f}{each[3]:12.1f}"
                f"{row['serial_ratio']:30.2f}{row['ratio']:7.2f}"
            )
    for way in TRANSPORTS:
        say(f"store by {way}: ms")
        say("  prompt  without  layer-wise   after it    cost: layer-wise, after")
        for prompt, row in found[way]["store"].items():
            each = [1e3 * row[name] for name in ("none", "layer_wise", "after")]
            costs = [1e3 * row[f"{name}_cost"] for name in ("layer_wise", "after")]
            say(
                f"  {prompt:>6s}{each[0]:9.1f}{each[1]:12.1f}{each[2]:11.1f}"
                f"{costs[0]:16.1f}{costs[1]:7.1f}"
            )

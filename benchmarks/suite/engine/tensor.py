"""Measures the gain of ranks and the cost of their sums, with one process, one process that
computes all shards (like instances of degree 1 beside others), and one process per shard.

The engines take turns with prompts alone and with batches of decodes, and the best time of each
counts. The sums' share is the time that the first rank spends adding up and waiting for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.engine.builtin import DTYPES, open_model
from moonpool_engine.engine.ops import KvCache
from moonpool_engine.engine.parallel.tensor_group import Group
from moonpool_engine.engine.parallel.tensor_ranks import (
    RankOptions,
    Ranks,
    check_ranks,
    sharded_engine,
)
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.transfer.arena import Arena

DTYPE = "bfloat16"
BLOCK_TOKENS = 64
PROMPTS_TOKENS = (128, 512, 2048)
BATCHES, CONTEXT_TOKENS = (1, 8, 32), 512
DECODE_STEPS = 8  # of which the quickest counts
_GREEDY = SamplingParams(temperature=0.0)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Runner:
    name: str
    engine: Engine
    group: Group | None = None

    def step(self, sequences: list[StepEntry]) -> tuple[float, float]:
        """Returns the seconds of the step, and of the sums within it."""
        before_s = 0.0 if self.group is None else self.group.waited_s
        seconds = self.engine.step(sequences).seconds
        return seconds, 0.0 if self.group is None else self.group.waited_s - before_s


def bench_tensor(model: str, num_ranks: int, repeats: int, say: Say) -> dict[str, Any]:
    """Raises ValueError for an unsuitable model, StageLostError, ArenaError."""
    torch.set_num_threads(1)
    with ExitStack() as open_:
        runners = [open_.enter_context(_runner(model, *shape)) for shape in _shapes(num_ranks)]
        found: dict[str, Any] = {
            "model": model,
            "dtype": DTYPE,
            "ops": runners[-1].engine.ops_name,
            "rows": [],
        }
        rows = [("prompt", tokens) for tokens in PROMPTS_TOKENS]
        for kind, size in [*rows, *(("decodes", batch) for batch in BATCHES)]:
            step = _prompt(size) if kind == "prompt" else _decodes(size)
            turns = repeats if kind == "prompt" else repeats * DECODE_STEPS
            row = {"kind": kind, "size": size, **_measured(runners, step, turns)}
            found["rows"].append(row)
            say(_words(row, runners))
    return found


def _shapes(num_ranks: int) -> list[tuple[str, int, int]]:
    """Returns name, ranks and shards of each row."""
    return [
        ("one process", 1, 1),
        (f"one process of {num_ranks} shards", 1, num_ranks),
        (f"{num_ranks} ranks", num_ranks, num_ranks),
    ]


@contextmanager
def _runner(name: str, label: str, num_ranks: int, num_shards: int) -> Iterator[_Runner]:
    model, ops = open_model(name, DTYPE), choose_ops(DTYPE)
    check_ranks(model, num_ranks, num_shards)
    layout = make_layout(model, BLOCK_TOKENS, ops, num_shards)
    arena = Arena(layout, _num_blocks(), sealed=False)
    flat = torch.frombuffer(arena.buffer, dtype=DTYPES[DTYPE])
    cache = KvCache(flat.view(arena.num_blocks, layout.num_layers, layout.slice_elements), layout)
    try:
        if num_ranks == 1:
            sharded = num_shards > 1
            engine = sharded_engine(model, ops, cache, num_shards) if sharded else None
            yield _Runner(label, engine or Engine(model, ops, cache))
            return
        options = RankOptions(num_ranks, num_shards)
        ranks = Ranks(model, ops, cache, arena.fd, options, "bench", lambda message: None)
        try:
            yield _Runner(label, ranks.engine, ranks.group)
        finally:
            ranks.close()
    finally:
        arena.close()


def _num_blocks() -> int:
    decodes = max(BATCHES) * (CONTEXT_TOKENS // BLOCK_TOKENS + 1)
    return max(decodes, max(PROMPTS_TOKENS) // BLOCK_TOKENS + 1)


def _prompt(num_tokens: int) -> list[StepEntry]:
    blocks = [BlockId(i) for i in range(num_tokens // BLOCK_TOKENS + 1)]
    tokens = [(7 * i) % 251 for i in range(num_tokens)]
    return [StepEntry(AttemptId("prompt"), tokens, 0, blocks, _GREEDY)]


def _decodes(batch: int) -> list[StepEntry]:
    """Decodes after any content of the blocks: zeros, or an earlier prompt."""
    own = CONTEXT_TOKENS // BLOCK_TOKENS + 1
    return [
        StepEntry(
            AttemptId(str(i)),
            [i],
            CONTEXT_TOKENS,
            [BlockId(b) for b in range(own * i, own * (i + 1))],
            _GREEDY,
        )
        for i in range(batch)
    ]


def _measured(runners: list[_Runner], step: list[StepEntry], turns: int) -> dict[str, Any]:
    best = [(float("inf"), 0.0)] * len(runners)
    for _ in range(turns + 1):
        for i, runner in enumerate(runners):
            best[i] = min(best[i], runner.step(step))
    (whole_s, _), (shards_s, _), (ranks_s, sums_s) = best
    return {
        "one_process_s": whole_s,
        "one_process_of_all_shards_s": shards_s,
        "ranks_s": ranks_s,
        "speed_up": whole_s / ranks_s,
        "cost_of_shards": shards_s / whole_s - 1.0,
        "share_of_sums": sums_s / ranks_s,
    }


def _words(row: dict[str, Any], runners: list[_Runner]) -> str:
    what = f"a prompt of {row['size']} tokens"
    if row["kind"] == "decodes":
        what = f"{row['size']} decodes at {CONTEXT_TOKENS} tokens"
    times_s = (row["one_process_s"], row["one_process_of_all_shards_s"], row["ranks_s"])
    parts = [f"{r.name} {1e3 * s:.1f} ms" for r, s in zip(runners, times_s, strict=True)]
    gain = f"{row['speed_up']:.2f} x, {row['share_of_sums']:.0%} of it in sums"
    return f"{what}: {', '.join(parts)} ({gain})"

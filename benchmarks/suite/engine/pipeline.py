"""Measures the gain of pipeline stages and their waits: an instance of several processes compared
with an instance of one process.

Measures a long prompt in chunks and whole (Mooncake v3 section 5.1: X times as fast, minus the
bubble), a short prompt that must not become slower, and prompts with decodes in micro-batches
(SARATHI sections 3.2 and 5.3). Each case is measured, and computed by the cost model fitted in the
same run; cases with more stages than cores are only computed. Steps and micro-batches are those of
the serving state machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import torch

from benchmarks.suite.engine.pipelined_instance import (
    PipelinedInstance,
    PipelinedJob,
    PipelinedResult,
    made_up,
    simulate,
)
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import StepCost
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.engine.calibrate import StepSample, fit_samples, measure_samples
from moonpool_engine.engine.spec import ModelSpec

PARTS = ("long", "short", "mixed", "decode")
FIT_S = 6.0
HOPS = 100  # single tokens; the fastest gives the time of a hop
SIMULATED = (1, 2, 4, 8)
MIX_CHUNK_TOKENS, MIX_SEQUENCES = 256, 8
MIX_JOBS, MIX_PROMPT_TOKENS, MIX_OUTPUT_TOKENS = 16, (128, 768), (16, 32)
DECODE_JOBS, DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS = 16, 64, 64
_GREEDY = SamplingParams(temperature=0.0)
Say = Callable[[str], None]


@dataclass(slots=True)
class _Bench:
    one: PipelinedInstance
    several: PipelinedInstance
    cost: FittedCost
    hop_s: float
    say: Say

    def truth(self, num_stages: int) -> StepCost:
        nic = Nic(self.cost.shared_memory_bytes_per_s, self.hop_s)
        return group_cost(self.cost, shape_of(self.one.spec), num_stages, "cpp", nic)

    def run(
        self,
        num_stages: int,
        jobs: Sequence[PipelinedJob],
        measured: PipelinedResult | None = None,
        **config: Any,
    ) -> dict[str, Any]:
        """Simulates the case, and measures it if there is such an instance and it was not measured
        before."""
        layout, blocks = self.one.layout, self.one.arena.num_blocks
        found: dict[str, Any] = {"stages": num_stages}
        for piped in (self.one, self.several):
            if piped.num_stages == num_stages:
                found["measured"] = _figures(measured or piped.run(jobs, **config))
        ran = simulate(jobs, self.truth(num_stages), layout, blocks, **config)
        found["simulated"] = _figures(ran)
        return found


def bench_pipeline(
    model: str,
    num_stages: int,
    prompt_tokens: int,
    chunk_tokens: int,
    short_tokens: int,
    repeats: int,
    seed: int,
    parts: Sequence[str],
    say: Say,
    device: str = "cpu",
) -> dict[str, Any]:
    """The figures of these parts, in bfloat16, each stage with one thread. Raises ValueError for an
    unsuitable model, StageLostError, ArenaError."""
    torch.set_num_threads(1)
    mix = MIX_JOBS * (MIX_PROMPT_TOKENS[1] + MIX_OUTPUT_TOKENS[1])
    kv_tokens = max(prompt_tokens, mix) + 64 * MIX_JOBS
    with (
        PipelinedInstance(model, "bfloat16", 1, kv_tokens, chunk_tokens, device=device) as one,
        PipelinedInstance(
            model, "bfloat16", num_stages, kv_tokens, chunk_tokens, device=device
        ) as several,
    ):
        say("measuring one process, and fitting the cost model")
        samples = measure_samples(one.engine, FIT_S)
        alone: PipelinedResult | None = None
        if "long" in parts:
            alone = one.run([made_up(1, prompt_tokens, 1)], chunk_tokens=chunk_tokens)
            samples += grown(alone.steps_s, prompt_tokens, chunk_tokens)
        cost = fit_samples(samples)
        hop_s = _hop_s(one, several)
        bench = _Bench(one, several, cost, hop_s, say)
        stages = sorted({*SIMULATED, num_stages})
        most = [x for x in stages if x <= one.spec.num_layers]
        found: dict[str, Any] = {
            "model": model,
            "ops": several.engine.ops_name,
            "seed": seed,
            "cost": msgspec.to_builtins(cost),
            "hop_s": hop_s,
        }
        if alone is not None:
            found["long"] = _long(bench, most, prompt_tokens, chunk_tokens, alone)
        if "short" in parts:
            found["short"] = _short(bench, short_tokens, repeats)
        if "mixed" in parts:
            found["mixed"] = _mixed(bench, most, seed)
        if "decode" in parts:
            found["decode"] = _decode(bench, most)
        return found


def shape_of(spec: ModelSpec) -> ModelShape:
    return ModelShape(
        name=spec.family,
        layers=spec.num_layers,
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.intermediate_size,
        vocab=spec.vocab_size,
        tied=spec.tie_embeddings,
    )


def grown(steps_s: Sequence[float], prompt_tokens: int, chunk_tokens: int) -> list[StepSample]:
    """Returns the seconds of prompts of 1, 2, 4 ... chunks, from the steps of the longest prompt.
    The long prompts show the cost of attention to this many tokens, which short steps do not
    show."""
    ended_s = list(accumulate(steps_s))
    most = len(steps_s)
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    return [
        StepSample(
            kind="prefill",
            new_tokens=min(count * chunk_tokens, prompt_tokens),
            context_tokens=0,
            batch=1,
            seconds=ended_s[count - 1],
        )
        for count in counts
    ]


def _figures(piped: PipelinedResult) -> dict[str, Any]:
    return {
        "seconds": piped.seconds,
        "bubble_share": piped.bubble_share,
        "busy_s": piped.busy_s,
        "cpu_s": piped.cpu_s,
    }


def _hop_s(one: PipelinedInstance, several: PipelinedInstance) -> float:
    """Returns how much longer a step through several stages takes than through one, by the hop."""
    step = [StepEntry(AttemptId("hop"), [7], 64, [BlockId(0), BlockId(1)], _GREEDY)]
    best_s = [min(p.engine.step(step).seconds for _ in range(HOPS)) for p in (one, several)]
    return max(best_s[1] - best_s[0], 0.0) / (several.num_stages - 1)


def _long(
    bench: _Bench,
    stages: Sequence[int],
    prompt_tokens: int,
    chunk_tokens: int,
    alone: PipelinedResult,
) -> dict[str, Any]:
    """Plays one prompt alone: in chunks, and whole, which a pipeline does not make any faster."""
    jobs = [made_up(1, prompt_tokens, 1)]
    found: dict[str, Any] = {"prompt_tokens": prompt_tokens, "chunk_tokens": chunk_tokens}
    found["chunked"] = [
        bench.run(x, jobs, alone if x == 1 else None, chunk_tokens=chunk_tokens) for x in stages
    ]
    whole: dict[str, Any] = {"chunk_tokens": prompt_tokens, "batching": "whole-prompts"}
    found["whole"] = [bench.run(x, jobs, **whole) for x in stages if x > 1]
    for kind in ("chunked", "whole"):
        for row in found[kind]:
            for way, first in found["chunked"][0].items():
                if way in row and way != "stages":
                    row[way]["speed_up"] = first["seconds"] / row[way]["seconds"]
            bench.say(f"{prompt_tokens} tokens {kind}, {_words(row)}")
    return found


def _short(bench: _Bench, short_tokens: int, repeats: int) -> dict[str, Any]:
    """A prompt of one chunk: both instances in turns, the best of each."""
    jobs = [made_up(2, short_tokens, 1)]
    best_s = [float("inf")] * 2
    for _ in range(repeats + 1):
        for i, piped in enumerate((bench.one, bench.several)):
            best_s[i] = min(best_s[i], piped.run(jobs, chunk_tokens=short_tokens).seconds)
    cost = best_s[1] / best_s[0] - 1.0
    bench.say(
        f"{short_tokens} tokens: {best_s[0]:.4f} s in one process, {best_s[1]:.4f} s in"
        f" {bench.several.num_stages} stages ({cost:+.1%})"
    )
    return {
        "prompt_tokens": short_tokens,
        "one_s": best_s[0],
        "stages_s": best_s[1],
        "cost": cost,
    }


def _mixed(bench: _Bench, stages: Sequence[int], seed: int) -> dict[str, Any]:
    """Runs prompts and decodes of all lengths together: chunks of one size make micro-batches of
    one size, whole prompts do not."""
    rng = random.Random(seed)
    jobs = [
        made_up(i, rng.randint(*MIX_PROMPT_TOKENS), rng.randint(*MIX_OUTPUT_TOKENS))
        for i in range(MIX_JOBS)
    ]
    found: dict[str, Any] = {
        "jobs": [(len(job.token_ids), job.output_tokens) for job in jobs],
        "chunk_tokens": MIX_CHUNK_TOKENS,
    }
    for batching in ("chunked", "whole-prompts"):
        config: dict[str, Any] = {
            "chunk_tokens": MIX_CHUNK_TOKENS,
            "max_sequences": MIX_SEQUENCES,
            "batching": batching,
        }
        found[batching] = [bench.run(x, jobs, **config) for x in stages]
        for row in found[batching]:
            bench.say(f"prompts and decodes, {batching}, {_words(row)}")
    return found


def _decode(bench: _Bench, stages: Sequence[int]) -> dict[str, Any]:
    """Decodes answers of one length: in equal micro-batches, one per stage, and in groups of the
    answers whose tokens are ready at the same time."""
    jobs = [made_up(i, DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS) for i in range(DECODE_JOBS)]
    usual: dict[str, Any] = {"chunk_tokens": MIX_CHUNK_TOKENS, "max_sequences": DECODE_JOBS}
    found: dict[str, Any] = {"jobs": DECODE_JOBS, "output_tokens": DECODE_OUTPUT_TOKENS}
    for name, config in (("micro-batches", usual), ("as they come", usual | {"micro_batches": 1})):
        found[name] = [bench.run(x, jobs, **config) for x in stages if x > 1]
        for row in found[name]:
            bench.say(f"{DECODE_JOBS} answers, {name}, {_words(row)}")
    return found


def _words(row: dict[str, Any]) -> str:
    parts = []
    for way in ("measured", "simulated"):
        if way in row:
            figures = row[way]
            words = f"{way} {figures['seconds']:.2f} s, bubble {figures['bubble_share']:.1%}"
            if figures["cpu_s"]:
                words += f" (CPU {figures['cpu_s']:.2f} s)"
            if "speed_up" in figures:
                words += f", {figures['speed_up']:.2f} x"
            parts.append(words)
    return f"{row['stages']} stages: {'; '.join(parts)}"

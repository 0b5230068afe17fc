"""Measures what 8-bit weights cost in quality and bring in speed, compared with the same model in
bfloat16.

Quality: both models get the answers of the bfloat16 model as input, so that their distributions can
be compared at each position (KL divergence, likeliest token, perplexity of a text drawn from
bfloat16). Then each model answers greedily alone. Speed: decode and prefill beside the bytes each
must read. One thread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.engine.engine import machine_limits, measure_rows, shares
from benchmarks.suite.engine.engine_rows import ELEMENT_BYTES, EngineBenchRows
from benchmarks.suite.engine.single_instance import SoloInstance
from moonpool.config.tables import Quantization
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId
from moonpool_engine.engine.quantized.int8 import GROUP
from moonpool_engine.engine.runner import Engine

INT8_BYTES = 1 + 4 / GROUP
PATTERN_TOKENS, REPEATED_TOKENS = 96, 16
ROWS = EngineBenchRows(prefills=(512,), batches=(1, 8), contexts=(512,))
Say = Callable[[str], None]


def bench_quantization(
    model: str, prompts: int, answer_tokens: int, seed: int, say: Say
) -> dict[str, Any]:
    """Returns all figures of one model: `quality`, `speed` of both, and the machine's `limits`."""
    torch.set_num_threads(1)
    kv_tokens = max(ROWS.kv_tokens, prompts * (PATTERN_TOKENS + answer_tokens + 128))
    kinds: tuple[Quantization, ...] = ("none", "int8")
    plain, rounded = (
        SoloInstance(model, "bfloat16", kv_tokens=kv_tokens, quantization=kind) for kind in kinds
    )
    rng = random.Random(seed)
    texts = [_prompt(rng) for _ in range(prompts)]
    quality = _beside(plain, rounded, texts, answer_tokens, seed)
    quality["greedy"] = _greedy(plain, rounded, texts, answer_tokens)
    say(
        f"KL {quality['kl_mean']:.2e} nats (p99 {quality['kl_p99']:.2e}), likeliest token equal in"
        f" {quality['top1_equal']:.2%}; perplexity {quality['perplexity']['bfloat16']:.3f} and"
        f" {quality['perplexity']['int8']:.3f}; greedy answers equal for"
        f" {quality['greedy']['equal_tokens']:.1%} of their tokens"
    )
    limits = machine_limits()
    speed: dict[str, Any] = {}
    for name, solo, weight_bytes in (
        ("bfloat16", plain, ELEMENT_BYTES),
        ("int8", rounded, INT8_BYTES),
    ):
        say(name)
        speed[name] = measure_rows(solo, ROWS, 3, say)
        speed[name]["shares"] = shares(solo.spec, ROWS, speed[name], limits, weight_bytes)
    gain = {
        batch: speed["int8"]["decode"]["512"][batch] / rate
        for batch, rate in speed["bfloat16"]["decode"]["512"].items()
    }
    say("decode, int8 over bfloat16: " + ", ".join(f"batch {b} {g:.2f} x" for b, g in gain.items()))
    origin = {"model": model, "ops": plain.engine.ops_name, "seed": seed}
    return origin | {"quality": quality, "speed": speed, "decode_gain": gain, "limits": limits}


def _prompt(rng: random.Random) -> list[int]:
    """Returns random bytes, then their beginning once more, so that the model can predict how the
    text goes on."""
    pattern = [rng.randrange(256) for _ in range(PATTERN_TOKENS)]
    return pattern + pattern[:REPEATED_TOKENS]


def _beside(
    plain: SoloInstance,
    rounded: SoloInstance,
    texts: Sequence[Sequence[int]],
    answer_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Compares both models on the same tokens, drawn from the bfloat16 model's distribution."""
    draws = torch.Generator().manual_seed(seed)
    forced = [_Forced(plain, texts), _Forced(rounded, texts)]
    divergences: list[Tensor] = []
    equal, drawn_logs = 0, torch.zeros(2, dtype=torch.float64)
    for _ in range(answer_tokens):
        logs = [one.logits().double().log_softmax(-1) for one in forced]
        divergences.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
        equal += int((logs[0].argmax(-1) == logs[1].argmax(-1)).sum())
        tokens = torch.multinomial(logs[0].exp(), 1, generator=draws)
        drawn_logs += torch.stack([log.gather(1, tokens).sum() for log in logs])
        for one in forced:
            one.append(tokens.flatten().tolist())
    count = len(texts) * answer_tokens
    kl = torch.cat(divergences)
    perplexity = [math.exp(-float(total) / count) for total in drawn_logs]
    return {
        "positions": count,
        "kl_mean": float(kl.mean()),
        "kl_p99": float(kl.quantile(0.99)),
        "kl_max": float(kl.max()),
        "top1_equal": equal / count,
        "perplexity": {"bfloat16": perplexity[0], "int8": perplexity[1]},
    }


class _Forced:
    """Sequences whose tokens are given from outside."""

    def __init__(self, solo: SoloInstance, texts: Sequence[Sequence[int]]) -> None:
        self._engine: Engine = solo.engine
        self._layout = solo.layout
        self._texts = [list(text) for text in texts]
        self._done = 0
        self._blocks_each = solo.engine.num_blocks // len(texts)

    def logits(self) -> Tensor:
        """After the last token of every sequence: [S, vocab]."""
        found = self._engine.logits(
            [
                StepEntry(
                    AttemptId(str(i)),
                    text[self._done :],
                    self._done,
                    [BlockId(i * self._blocks_each + b) for b in range(self._blocks_each)],
                    None,
                )
                for i, text in enumerate(self._texts)
            ]
        )
        self._done = len(self._texts[0])
        return found

    def append(self, tokens: Sequence[int]) -> None:
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)


def _greedy(
    plain: SoloInstance, rounded: SoloInstance, texts: Sequence[Sequence[int]], answer_tokens: int
) -> dict[str, Any]:
    """Returns after how many tokens the models' greedy answers first differ."""
    lengths = [answer_tokens] * len(texts)
    pairs = zip(
        plain.generate(texts, lengths).token_ids,
        rounded.generate(texts, lengths).token_ids,
        strict=True,
    )
    together = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), answer_tokens)
        for pair in pairs
    ]
    return {
        "answers": len(texts),
        "equal_answers": together.count(answer_tokens) / len(texts),
        "equal_tokens": sum(together) / (len(texts) * answer_tokens),
    }

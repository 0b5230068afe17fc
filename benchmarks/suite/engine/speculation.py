"""Measures tokens per second with drafts and without, on texts that repeat themselves and on
others.

Both run in one process, in turns, on one engine and one thread, and do the work of a worker per
step without the head. Figures are CPU seconds of this process, which other processes of the machine
disturb less than the clock. Every answer is compared: the tokens must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.suite.engine.draft_model import (
    first_layers,
    limit_prompt,
    limit_row,
    prices,
    with_draft_model,
)
from benchmarks.suite.engine.single_instance import Generation, SoloInstance
from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.text.tokenizer import Tokenizer
from moonpool_engine.engine.builtin import LoadedModel, open_model, open_tokenizer
from moonpool_engine.engine.calibrate import fit_samples, measure_samples

CODE = '''def mean(values):
    """Return the mean of a list of numbers."""
    if not values:
        raise ValueError("no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def spread(values):
    """Return the difference of the largest and the smallest number."""
    if not values:
        raise ValueError("no values")
    return max(values) - min(values)
'''
TEXT = (
    "The cache of keys and values holds what a model has computed for the tokens that it has "
    "read. A server that keeps it can answer the next question about the same document without "
    "reading the document again. Memory is scarce, so the server must choose what to keep: it "
    "drops what was used least recently, or moves it to a disk, which is slower and larger."
)
CASES: dict[str, tuple[str, float, int]] = {
    "edit code": (
        f"Rename `mean` to `average`, and answer with the whole changed code.\n\n{CODE}",
        0.0,
        1,
    ),
    "quote": (f"Repeat this text word for word.\n\n{TEXT}", 0.0, 1),
    "summarise": (f"Summarise this text in two sentences.\n\n{TEXT}", 0.0, 1),
    "story": ("Write a short story about a lighthouse keeper who finds a map.", 0.0, 1),
    "story, sampled": ("Write a short story about a lighthouse keeper and a map.", 1.0, 1),
    "quote, 8 at a time": (f"Repeat this text word for word.\n\n{TEXT}", 0.0, 8),
    "story, 8 at a time": ("Write a short story about a ship without a captain.", 1.0, 8),
}
"""Name -> request, temperature, number of requests at a time."""
DRAFT_MODEL_CASES = ("edit code", "story")
BLOCK_TOKENS, KV_TOKENS = 16, 16_384
Say = Callable[[str], None]


def bench_speculation(
    model: str,
    dtype: str,
    answer_tokens: int,
    rounds: int,
    settings: SpeculativeConfig,
    draft_layers: int,
    say: Say,
) -> dict[str, Any]:
    """`draft_layers`: number of the model's layers that serve as a draft model; 0 means none.
    Raises ModelError."""
    torch.set_num_threads(1)
    loaded = open_model(model, dtype)
    tokenizer = open_tokenizer(loaded.tokenizer, loaded.spec.vocab_size)
    plain = SoloInstance(model, loaded.dtype, KV_TOKENS, BLOCK_TOKENS, prefix_caching=True)
    cost = fit_samples(measure_samples(plain.engine, 5.0))
    drafting = plain.with_drafts(settings, cost)
    rows: list[dict[str, Any]] = []
    for name, (text, temperature, batch) in CASES.items():
        prompt = _prompt(tokenizer, text)
        case = _Case([prompt] * batch, answer_tokens, temperature)
        for number in range(rounds):
            case.run(plain, drafting, number)
        rows.append({"case": name, "batch": batch, **case.figures()})
        say(f"{name}: {rows[-1]['gain']:.2f} x, {rows[-1]['accepted_share']:.0%} accepted")
    # The same question once more: its answer is in cached blocks.
    again = _Case([prompt], answer_tokens, 1.0)
    drafting.answer([_fresh(prompt, rounds)], [answer_tokens], 1.0, rounds)
    for _ in range(rounds):
        again.run(plain, drafting, rounds)
    rows.append({"case": "the same story again", "batch": 1, **again.figures()})
    say(f"the same story again: {rows[-1]['gain']:.2f} x")
    if draft_layers:
        bench = _DraftModelBench(answer_tokens, rounds)
        prompts = {name: _prompt(tokenizer, CASES[name][0]) for name in DRAFT_MODEL_CASES}
        for row in bench.rows(plain, cost, loaded, draft_layers, prompts):
            rows.append(row)
            say(f"{row['case']}: {row['gain']:.2f} x, {row['accepted_share']:.0%} accepted")
    return {
        "model": model,
        "dtype": loaded.dtype,
        "answer_tokens": answer_tokens,
        "rounds": rounds,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "draft_layers": draft_layers,
        "rows": rows,
    }


class _DraftModelBench:
    """Rows with a draft model (`draft_model`)."""

    def __init__(self, answer_tokens: int, rounds: int) -> None:
        self._answer_tokens = answer_tokens
        self._rounds = rounds

    def rows(
        self,
        plain: SoloInstance,
        cost: FittedCost,
        model: LoadedModel,
        num_layers: int,
        prompts: dict[str, list[int]],
    ) -> Iterator[dict[str, Any]]:
        num_layers = min(num_layers, model.spec.num_layers)
        draft = first_layers(model, num_layers)
        drafting, draft_cost = with_draft_model(plain, cost, draft, KV_TOKENS)
        for name, prompt in prompts.items():
            figures = self._run(prompt, plain, drafting) | prices(cost, draft_cost)
            yield {"case": f"{name}, draft of {num_layers} layers", "batch": 1, **figures}
        prompt = limit_prompt(100)
        figures = limit_row(
            model.dtype, KV_TOKENS, BLOCK_TOKENS, lambda *both: self._run(prompt, *both)
        )
        yield {"case": "draft that is always right", "batch": 1, **figures}

    def _run(
        self, prompt: Sequence[int], plain: SoloInstance, drafting: SoloInstance
    ) -> dict[str, Any]:
        case = _Case([prompt], self._answer_tokens, 0.0)
        for number in range(self._rounds):
            case.run(plain, drafting, 1000 + number)
        return case.figures()


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


class _Case:
    """One kind of request, answered by both instances in turns."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int, temperature: float
    ) -> None:
        self._prompts, self._temperature = prompts, temperature
        self._lengths = [answer_tokens] * len(prompts)
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._steps = [0, 0]
        self._drafted = self._accepted = 0

    def run(self, plain: SoloInstance, drafting: SoloInstance, number: int) -> None:
        """The answers of both. Each round has different prompts, so that no answer is cached."""
        prompts = [_fresh(prompt, number) for prompt in self._prompts]
        before = dict(drafting.counters)
        made: list[Generation] = []
        for which, instance in enumerate((plain, drafting)):
            instance.answer(prompts, [1] * len(prompts), self._temperature, number)  # the prefill
            began_s = time.process_time()
            made.append(instance.answer(prompts, self._lengths, self._temperature, number))
            self._seconds[which].append(time.process_time() - began_s)
            self._steps[which] += len(made[-1].steps)
        assert made[0].token_ids == made[1].token_ids, "drafts have changed an answer"
        self._drafted += _grown(drafting, before, "draft_tokens")
        self._accepted += _grown(drafting, before, "accepted_draft_tokens")

    def figures(self) -> dict[str, Any]:
        num_tokens = sum(self._lengths)
        plain_s, drafting_s = (median(seconds) for seconds in self._seconds)
        pairs = zip(*self._seconds, strict=True)
        return {
            "plain_tokens_per_s": num_tokens / plain_s,
            "drafting_tokens_per_s": num_tokens / drafting_s,
            "gain": median(a / b for a, b in pairs),
            "plain_steps": self._steps[0],
            "drafting_steps": self._steps[1],
            "drafted_tokens": self._drafted,
            "accepted_share": self._accepted / self._drafted if self._drafted else 0.0,
        }


def _fresh(prompt: Sequence[int], number: int) -> list[int]:
    """Returns the prompt after unique tokens, so that no cached block of another round is found."""
    return [1, *[100 + number] * BLOCK_TOKENS, *prompt]


def _grown(instance: SoloInstance, before: dict[str, float], name: str) -> int:
    return int(instance.counters.get(name, 0) - before.get(name, 0))

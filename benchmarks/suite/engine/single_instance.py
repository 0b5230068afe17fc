"""Runs one mixed instance without processes or sockets: its state machine and its engine, in a
plain loop.

Does a worker's work per step, without the head. So the figures include scheduler, engine and
sampler, like a peer's offline mode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from itertools import count

import msgspec

from moonpool.config.tables import Quantization, SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import AttemptId, PrefillStarted, StartPrefill, StepTokens
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool.types import Role, SamplingParams, Token
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_lab.solo import solo_attempt

FREE = FittedCost(prefill=(0.0, 0.0, 0.0, 0.0), decode=(0.0, 0.0, 0.0))


class SoloInstance:
    """Answers batches of prompts."""

    def __init__(
        self,
        model: str | LoadedModel,
        dtype: str,
        kv_tokens: int,
        block_tokens: int = 64,
        chunk_tokens: int = 512,
        prefix_caching: bool = False,
        quantization: Quantization = "none",
    ) -> None:
        loaded = open_model(model, dtype) if isinstance(model, str) else model
        layout = make_layout(loaded, block_tokens)
        cache = empty_cache(layout, layout.blocks_for(kv_tokens))
        self.spec = loaded.spec
        self.layout = layout
        ops = choose_ops(dtype, quantization=quantization)
        self.engine = Engine(loaded, ops, cache)
        config = InstanceConfig(chunk_tokens=chunk_tokens, prefix_caching=prefix_caching)
        self._config = config
        self._drafter: Drafter | None = None
        self._instance = Instance(
            config, layout, layout.blocks_for(kv_tokens), Role.MIXED, FREE, ()
        )
        self._ids = count()

    def with_drafts(
        self,
        settings: SpeculativeConfig,
        cost: FittedCost,
        drafter: Drafter | None = None,
        draft_model: DraftModelPlace | None = None,
    ) -> SoloInstance:
        """Returns an instance with the same weights and with separate blocks, whose decodes have
        drafts, also from a draft model if one is given."""
        other = copy(self)
        cache = empty_cache(self.layout, self._instance.pool.num_blocks)
        other.engine = copy(self.engine)
        other.engine.cache = cache
        other._config = msgspec.structs.replace(self._config, speculative=settings)
        other._instance = Instance(
            other._config,
            self.layout,
            self._instance.pool.num_blocks,
            Role.MIXED,
            cost,
            (),
            draft_model=draft_model,
        )
        other._drafter = drafter
        return other

    @property
    def counters(self) -> dict[str, float]:
        """Totals of the instance's state machine."""
        return self._instance.counters

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Generation:
        """Answers all prompts together, greedily, each with as many tokens as `lengths` says."""
        return self.answer(prompts, lengths, temperature=0.0)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        temperature: float,
        seed: int = 0,
    ) -> Generation:
        """Like `generate`, but samples, with a separate seed for each prompt."""
        generation = Generation()
        began_s = time.perf_counter()
        steps: list[RunStep] = []
        performers: Performers = {RunStep: steps.append, SendReport: generation.hear}
        driver = InstanceDriver(self._instance, lambda: 0.0, performers)
        for number, (prompt, num_tokens) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=num_tokens,
                ignore_eos=True,
                seed=1000 * seed + number,
            )
            attempt = solo_attempt(str(next(self._ids)), tuple(prompt), sampling)
            generation.tokens[attempt.attempt_id] = []
            driver.post(StartPrefill(attempt=attempt))
        while steps:
            step_began_s = time.perf_counter()
            driver.post(self._run(steps.pop()))
            generation.note_step(time.perf_counter() - step_began_s)
        generation.seconds = time.perf_counter() - began_s
        return generation

    def _run(self, step: RunStep) -> StepEnded:
        if self._drafter is None:
            result = self.engine.step(step.entries)
            return StepEnded(result.tokens, result.seconds, further=result.further)
        entries, drafted, drafting_s = self._drafter.run(step.entries)
        result = self.engine.step(entries)
        seconds = result.seconds + drafting_s
        return StepEnded(result.tokens, seconds, further=result.further, drafted=drafted)


class Generation:
    """The tokens of `generate`; for each step that drew tokens, its seconds and their number."""

    def __init__(self) -> None:
        self.tokens: dict[AttemptId, list[Token]] = {}
        self.steps: list[tuple[float, int]] = []
        self.cached_tokens = 0
        self.seconds = 0.0
        self._drawn = 0  # tokens drawn in this step

    def hear(self, action: SendReport) -> None:
        report = action.report
        if isinstance(report, StepTokens):
            for item in report.attempts:
                self.tokens[item.attempt_id].extend(item.tokens)
                self._drawn += len(item.tokens)
        elif isinstance(report, PrefillStarted):
            self.cached_tokens += report.cached_tokens

    def note_step(self, seconds: float) -> None:
        if self._drawn:
            self.steps.append((seconds, self._drawn))
        self._drawn = 0

    @property
    def token_ids(self) -> list[list[int]]:
        return [[token.token_id for token in tokens] for tokens in self.tokens.values()]

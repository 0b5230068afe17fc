"""One mixed instance without processes or sockets: its state machine and its engine, in a plain
loop.

What a worker does per step, without the head: so the figures hold scheduler, engine and sampler,
as a peer's offline mode does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from itertools import count

import msgspec

from moonpool.config.tables import Quantization, SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import (
    AttemptId,
    AttemptSpec,
    PrefillStarted,
    StartPrefill,
    StepTokens,
)
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded, WorkerAction
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool.types import Role, SamplingParams, Slo, Token
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout

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
        """An instance like this one, with the same weights and blocks of its own, whose decodes
        have drafts, also of a draft model if one is given."""
        other = copy(self)
        cache = empty_cache(self.layout, self._instance.pool.num_blocks)
        other.engine = copy(self.engine)
        other.engine._cache = cache
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
        """Generates as `generate` does, with draws; each prompt has a seed of its own."""
        generation = Generation()
        began_s = time.perf_counter()
        actions: list[WorkerAction] = []
        for number, (prompt, num_tokens) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=num_tokens,
                ignore_eos=True,
                seed=1000 * seed + number,
            )
            work = AttemptSpec(
                attempt_id=AttemptId(str(next(self._ids))),
                token_ids=tuple(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                slo=Slo(ttft_s=1e9, tbt_s=1e9),
                tenant="",
                use_cache=True,
                timeout_s=1e9,
            )
            generation.tokens[work.attempt_id] = []
            actions += self._instance.handle(StartPrefill(work=work), 0.0)
        last_s = began_s
        while True:
            step = next((a for a in actions if isinstance(a, RunStep)), None)
            now_s = time.perf_counter()
            self._note(actions, generation, now_s - last_s)
            last_s = now_s
            if step is None:
                break
            actions = self._instance.handle(self._run(step), 0.0)
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

    def _note(
        self, actions: Sequence[WorkerAction], generation: Generation, seconds: float
    ) -> None:
        for action in actions:
            if not isinstance(action, SendReport):
                continue
            if isinstance(action.report, StepTokens):
                for item in action.report.works:
                    generation.tokens[item.attempt_id].extend(item.tokens)
                drawn = sum(len(item.tokens) for item in action.report.works)
                generation.steps.append((seconds, drawn))
            elif isinstance(action.report, PrefillStarted):
                generation.cached_tokens += action.report.cached_tokens


class Generation:
    """The tokens of `generate`; for each step that drew tokens, its seconds and their number."""

    def __init__(self) -> None:
        self.tokens: dict[AttemptId, list[Token]] = {}
        self.steps: list[tuple[float, int]] = []
        self.cached_tokens = 0
        self.seconds = 0.0

    @property
    def token_ids(self) -> list[list[int]]:
        return [[token.token_id for token in tokens] for tokens in self.tokens.values()]

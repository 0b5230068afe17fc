"""Tokens per second with a draft model and without.

No trained pair of a model and a smaller one with its tokenizer is at hand, so the rows are two
extremes. "first layers": the trained model's first layers guess for the model. These layers were
not trained to predict tokens alone, so most guesses are wrong, and the benchmark measures the rule
that stops drafting. "always right": random weights whose layers after the first few add nothing,
although they cost the full time. So the first few layers are a draft model that is always right.
The row shows what the machine allows, which a trained draft model approaches by its share of right
guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.suite.engine.single_instance import SoloInstance
from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.calibrate import fit_samples, measure_samples
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.packing import Weights
from moonpool_engine.engine.quantized.matrix import Matrix
from moonpool_engine.engine.runner import choose_ops

LIMIT_MODEL = "random:hidden=768,layers=16,heads=12,kv_heads=4,inter=2048,vocab=8192"
LIMIT_LAYERS = 2
MEASURE_S = 4.0
NEVER = 32
"""A minimal match length that the lookups never reach, so that all drafts come from the model."""
Run = Callable[[SoloInstance, SoloInstance], dict[str, Any]]


def first_layers(model: LoadedModel, num_layers: int) -> LoadedModel:
    """Returns the model without its later layers; the final norm and the head are those of the
    whole model."""
    return replace(model, spec=replace(model.spec, num_layers=num_layers))


def with_draft_model(
    plain: SoloInstance, cost: FittedCost, draft: LoadedModel, kv_tokens: int
) -> tuple[SoloInstance, FittedCost]:
    """An instance like `plain` with a draft model, and the draft model's step times."""
    block_tokens = plain.layout.block_tokens
    num_blocks = kv_tokens // block_tokens
    ops = choose_ops(draft.dtype)
    drafter = Drafter(draft, ops, num_blocks, block_tokens, plain.spec.vocab_size)
    draft_cost = fit_samples(measure_samples(drafter.engine, MEASURE_S))
    settings = SpeculativeConfig(
        method="draft_model",
        model="first layers",
        prompt_lookup_min=NEVER,
        prompt_lookup_max=NEVER,
    )
    place = DraftModelPlace(draft_cost, num_blocks, block_tokens, draft.spec.max_positions)
    return plain.with_drafts(settings, cost, drafter, place), draft_cost


def limit_row(dtype: str, kv_tokens: int, block_tokens: int, run: Run) -> dict[str, Any]:
    """The row of a draft model that is always right. `run` measures both of the instances."""
    loaded = open_model(LIMIT_MODEL, dtype)
    model = replace(loaded, weights=_IdleLayers(loaded.weights, LIMIT_LAYERS))
    plain = SoloInstance(model, dtype, kv_tokens, block_tokens, prefix_caching=True)
    cost = fit_samples(measure_samples(plain.engine, MEASURE_S))
    draft = first_layers(model, LIMIT_LAYERS)
    drafting, draft_cost = with_draft_model(plain, cost, draft, kv_tokens)
    return run(plain, drafting) | prices(cost, draft_cost)


def prices(cost: FittedCost, draft_cost: FittedCost) -> dict[str, float]:
    """Milliseconds of a decode of each model."""
    return {
        "model_ms": 1000 * cost.decode_step_s(1, 100),
        "draft_model_ms": 1000 * draft_cost.decode_step_s(1, 100),
    }


def limit_prompt(length: int) -> list[int]:
    """A prompt for the random model."""
    return [(37 * i) % 8000 for i in range(length)]


class _IdleLayers:
    """Weights whose layers from `first` on add nothing to their input."""

    def __init__(self, weights: Weights, first: int) -> None:
        self._weights = weights
        self._first = first

    def load(self, name: str) -> Tensor:
        tensor = self._weights.load(name)
        return tensor.zero_() if self._is_idle(name) else tensor

    def matrix(self, name: str) -> Matrix:
        return self.load(name)

    def _is_idle(self, name: str) -> bool:
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            return False
        return int(name.split(".layers.")[1].split(".")[0]) >= self._first

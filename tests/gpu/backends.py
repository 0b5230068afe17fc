"""Lists backends for the tests of GPU operations.

torch's operations also run on the CPU, so that copies and bookkeeping are tested everywhere; the
rest is skipped where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.cuda.torch_ops import TorchOps
from moonpool_engine.engine.ops import Ops, empty_cache
from moonpool_engine.engine.runner import Engine, make_layout

BACKENDS = ("torch-cpu", "torch-cuda", "triton-cuda")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # relative to the norm of all logits


def make_ops(backend: str) -> Ops:
    """Skips the test if the backend is not available."""
    kind, device = backend.split("-")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if kind == "torch":
        return TorchOps(torch.device(device))
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from moonpool_engine.engine.cuda.triton_ops import TritonOps

    return TritonOps(torch.device(device))


def difference(got: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of the norms. NaN counts as a large difference."""
    got, expected = got.double().cpu(), expected.double().cpu()
    share = float((got - expected).norm() / expected.norm())
    return share if share == share else float("inf")


@dataclass
class Bench:
    """Makes an engine over blocks full of NaN, handed out in random order."""

    engine: Engine
    free: list[int]

    @classmethod
    def of(cls, model: LoadedModel, ops: Ops, num_tokens: int, block_tokens: int = 16) -> Bench:
        layout = make_layout(model, block_tokens, ops)
        cache = empty_cache(layout, layout.blocks_for(num_tokens) + 40, ops.device)
        cache.blocks.fill_(torch.nan)
        free = list(range(len(cache.blocks)))
        random.Random(0).shuffle(free)
        return cls(Engine(model, ops, cache), free)

    def take(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.engine.layout.blocks_for(num_tokens))]

    def run(self, *parts: tuple[Sequence[int], int, list[int]]) -> Tensor:
        """Returns the logits after each (new tokens, start, blocks), all in one step."""
        steps = [
            StepEntry(AttemptId(str(i)), tokens, start, blocks, None)
            for i, (tokens, start, blocks) in enumerate(parts)
        ]
        return self.engine.logits(steps).cpu()

    def whole(self, prompt: Sequence[int]) -> Tensor:
        return self.run((prompt, 0, self.take(len(prompt))))[0]

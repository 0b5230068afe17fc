"""Makes random plans to compute the same sequences: in chunks, mixed with other sequences, in any
blocks.

Baseline and plans return the logits that follow chosen positions, so that tests can ask for
equality bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.native import available
from moonpool_engine.engine.ops import KvCache, Ops, empty_cache
from moonpool_engine.engine.parallel.tensor_ranks import sharded_engine
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import Engine, make_layout

EXACT_OPS = ("reference", "native")
"""Makes operations without quantization."""
OPS_NAMES = (*EXACT_OPS, "native-int8")
Prompt = list[int]


def missing(ops_name: str) -> str | None:
    """Returns the reason why these operations are not available, or None if they are."""
    return None if ops_name == "reference" else available()


def usable_ops(request: pytest.FixtureRequest) -> str:
    """Returns the operations that the fixture names; skips the test if they cannot run."""
    why = missing(request.param)
    if why is not None:
        pytest.skip(why)
    return str(request.param)


def make_ops(ops_name: str) -> Ops:
    if ops_name == "reference":
        return ReferenceOps()
    from moonpool_engine.engine.native.ops import NativeOps

    return NativeOps(quantization="int8" if ops_name == "native-int8" else "none")


class Lab:
    """Runs an engine over blocks full of NaN (in fp8: the bytes of NaN), handed out in random
    order."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        block_tokens: int,
        num_tokens: int,
        seed: int = 0,
        num_shards: int = 1,
    ) -> None:
        layout = make_layout(model, block_tokens, None, num_shards)
        num_blocks = layout.blocks_for(num_tokens) + 40
        self.cache: KvCache = empty_cache(layout, num_blocks)
        self._junk = 255 if layout.is_fp8 else torch.nan
        self.cache.blocks.fill_(self._junk)
        self.engine = (
            Engine(model, ops, self.cache)
            if num_shards == 1
            else sharded_engine(model, ops, self.cache, num_shards)
        )
        self.rng = random.Random(seed)
        self._free = list(range(num_blocks))
        self.rng.shuffle(self._free)

    def take_blocks(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(self.engine.layout.blocks_for(num_tokens))]

    def whole(self, prompt: Prompt) -> Tensor:
        """Returns the logits after `prompt`, computed alone and in one step, in fresh blocks."""
        blocks = self.take_blocks(len(prompt))
        logits = self.engine.logits([StepEntry(AttemptId("alone"), prompt, 0, blocks, None)])
        self.cache.blocks[blocks] = self._junk
        self._free += blocks
        return logits[0]

    def prefill(self, prompt: Prompt, blocks: list[int]) -> None:
        self.engine.step([StepEntry(AttemptId("prefix"), prompt, 0, blocks, None)])

    def rest(self, prompt: Prompt, cached: int, blocks: list[int]) -> Tensor:
        """Returns the logits after `prompt` whose first `cached` tokens are in their blocks
        already."""
        step = StepEntry(AttemptId("rest"), prompt[cached:], cached, blocks, None)
        return self.engine.logits([step])[0]

    def planned(self, prompts: Sequence[Prompt], marks: Sequence[set[int]]) -> list[list[Tensor]]:
        """Runs all prompts together, cut at random places and at all `marks`; returns the logits
        there."""
        blocks = [self.take_blocks(len(prompt)) for prompt in prompts]
        done = [0] * len(prompts)
        found: list[list[Tensor]] = [[] for _ in prompts]
        while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
            open_ = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
            batch = self.rng.sample(open_, self.rng.randint(1, len(open_)))
            ends = {i: self._cut(done[i], len(prompts[i]), marks[i]) for i in batch}
            logits = self.engine.logits(
                [
                    StepEntry(
                        AttemptId(str(i)), prompts[i][done[i] : ends[i]], done[i], blocks[i], None
                    )
                    for i in batch
                ]
            )
            for row, i in enumerate(batch):
                done[i] = ends[i]
                if ends[i] in marks[i]:
                    found[i].append(logits[row])
        return found

    def _cut(self, done: int, length: int, marks: set[int]) -> int:
        size = self.rng.choice((1, 1, 2, 3, 7, 16, 31, 64, 100, 1000))
        return min([done + size, length, *(mark for mark in marks if mark > done)])


def random_prompts(rng: random.Random, count: int, vocab: int, longest: int) -> list[Prompt]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]

"""Tests that blocks that no later token sees are released if all layers have a window. The logits
have the bits of requests that hold all blocks. Unwritten blocks are full of NaN, so that a read is
noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonpool.protocol.messages import AttemptSpec
from moonpool.types import Role, SamplingParams
from moonpool_lab.solo import solo_attempt
from tests.differential.checkpoints import CASES, save
from tests.differential.cluster import MiniCluster, Outcome
from tests.differential.plans import make_ops

PROMPTS = [[(7 * i * i + n * i + 11) % 300 for i in range(n)] for n in (3, 60, 64, 90)]
NUM_TOKENS = 120
# a window of 20 tokens touches at most 3 blocks of 16, including the block under way
WINDOW_BLOCKS = 3


def work(number: int, prompt: list[int], num_tokens: int = NUM_TOKENS) -> AttemptSpec:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=num_tokens, ignore_eos=True)
    return solo_attempt(f"w{number}", tuple(prompt), sampling)


class Ways:
    """Runs the same requests on clusters of several kinds."""

    def __init__(self, model: str, ops_name: str) -> None:
        self._options = {"model": model}
        self._ops = make_ops(ops_name)

    def outcomes(
        self, roles: dict[str, Role], decode: str | None = None, **options: object
    ) -> tuple[list[Outcome], list[int]]:
        """Returns the outcomes, and the number of blocks that the decoding instance held after each
        step."""
        cluster = MiniCluster(roles, "float32", self._ops, **self._options, **options)
        try:
            held: list[int] = []
            node = cluster.nodes[decode or "m"]
            cluster.after_step = lambda: held.append(node.instance.pool.num_held)
            found = []
            for number, prompt in enumerate(PROMPTS):
                cluster.submit(work(number, prompt), (decode and "p") or "m", decode)
                cluster.run()
                found.append(cluster.outcomes[f"w{number}"])
            return found, held
        finally:
            cluster.close()


def same(found: list[Outcome], expected: list[Outcome]) -> bool:
    return all(
        one.tokens == other.tokens
        and one.logits.keys() == other.logits.keys()
        and all(torch.equal(one.logits[at], other.logits[at]) for at in one.logits)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("ops_name", ["native", "reference"])
def test_held_blocks_stay_few_and_bits_stay_equal(ops_name: str, tmp_path: Path) -> None:
    save(CASES["mistral-window"], tmp_path)
    ways = Ways(str(tmp_path), ops_name)
    mixed, pair = {"m": Role.MIXED}, {"p": Role.PREFILL, "d": Role.DECODE}
    expected, all_held = ways.outcomes(mixed, keeps_all=True, prefix_caching=False)
    assert max(all_held) == (90 + NUM_TOKENS) // 16 + 1
    for roles, decode in ((mixed, None), (pair, "d")):
        for caching in (True, False):
            found, held = ways.outcomes(roles, decode, prefix_caching=caching)
            assert same(found, expected)
            assert max(held) <= 90 // 16 + 2, "a prompt is held whole until it is computed"
            assert max(held[-NUM_TOKENS + 1 :]) <= WINDOW_BLOCKS


def test_a_prefix_whose_blocks_were_released_is_found_while_it_is_cached(tmp_path: Path) -> None:
    """Whether a second request with the same tokens uses all, or the first, of the cached blocks of
    the first request, and gets the same bits."""
    save(CASES["mistral-window"], tmp_path)
    ops = make_ops("native")
    first = work(0, PROMPTS[3])

    def second(cluster: MiniCluster) -> Outcome:
        cluster.submit(work(1, [*PROMPTS[3], *tokens[:50]], 60), "m")
        cluster.run()
        return cluster.outcomes["w1"]

    cluster = MiniCluster({"m": Role.MIXED}, "float32", ops, model=str(tmp_path))
    alone = MiniCluster(
        {"m": Role.MIXED}, "float32", ops, model=str(tmp_path), prefix_caching=False
    )
    try:
        cluster.submit(first, "m")
        cluster.run()
        tokens = cluster.outcomes["w0"].tokens
        expected = second(alone)
        whole = second(cluster)
        assert whole.cached_tokens == (90 + 50 - 1) // 16 * 16 and same([whole], [expected])
        pool = cluster.nodes["m"].instance.pool
        pool.uncache([b for b in pool.cached_blocks() if pool.depth_of(b) == 2])
        del cluster.outcomes["w1"]
        part = second(cluster)
        assert part.cached_tokens == 32 and same([part], [expected])
    finally:
        cluster.close()
        alone.close()


def test_layers_that_see_everything_keep_everything(tmp_path: Path) -> None:
    save(CASES["gemma3"], tmp_path)
    _, held = Ways(str(tmp_path), "native").outcomes({"m": Role.MIXED})
    assert max(held) == (90 + NUM_TOKENS) // 16 + 1

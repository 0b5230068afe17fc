"""Drafts change no token: logits and tokens are bitwise those of plain decoding, alone, in a batch
beside chunks, and split into prefill and decode, for greedy and sampled answers of all kinds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.types import BadWord, Role, SamplingParams
from moonpool_lab.solo import solo_attempt
from tests.differential.cluster import MODEL, MiniCluster
from tests.differential.test_paths import make_ops

CHEAP_ROWS = FittedCost(prefill=(0.0, 1e-4, 0.0, 0.0), decode=(0.1, 1e-4, 0.0))
VARIANTS = [("reference", "float32"), ("native", "float32"), ("native", "bfloat16")]
VARIANTS.append(("native-int8", "bfloat16"))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.1, "seed": 3},
    {"temperature": 0.2, "top_p": 0.9, "seed": 8, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.05},
    {"temperature": 0.0, "logit_bias": ((7, 2.0), (8, 1.0)), "min_tokens": 20},
    {"temperature": 0.0, "stop_token_ids": tuple(range(150, 160))},
    {"temperature": 0.0, "bad_words": (BadWord("x", tuple((i, i + 1) for i in range(0, 300, 3))),)},
    {"temperature": 0.3, "seed": 4, "allowed_token_ids": tuple(range(0, 300, 2))},
]
ALL_TOKENS = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=5)


def works() -> list[AttemptSpec]:
    """Makes prompts with repetitions. After such a prompt, a random model often repeats itself,
    too."""
    rng = random.Random(11)
    made: list[AttemptSpec] = []
    for number in range(21):
        words = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
        prompt = words * rng.randrange(1, 12)
        sampling = SamplingParams(max_tokens=rng.randrange(20, 60), **KINDS[number % len(KINDS)])
        made.append(solo_attempt(str(number), tuple(prompt), sampling))
    return made


class SpeculationLab:
    """Makes clusters of one kind of operations and dtype."""

    def __init__(self, name: str, dtype: str) -> None:
        self.ops, self.dtype = make_ops(name), dtype
        self.clusters: list[MiniCluster] = []

    def __call__(self, roles: dict[str, Role], **options: Any) -> MiniCluster:
        made = MiniCluster(roles, self.dtype, self.ops, cost=CHEAP_ROWS, **options)
        self.clusters.append(made)
        return made


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: "-".join(v))
def lab(request: pytest.FixtureRequest) -> Iterator[SpeculationLab]:
    made = SpeculationLab(*request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)
    for cluster in made.clusters:
        cluster.close()


@pytest.fixture(scope="module")
def plain(lab: SpeculationLab) -> MiniCluster:
    """Returns the reference: each request alone, token by token, without cache."""
    cluster = lab({"one": Role.MIXED}, chunk_tokens=1024, prefix_caching=False)
    for work in works():
        cluster.submit(work, on="one")
        cluster.run()
    return cluster


def assert_as_plain(cluster: MiniCluster, plain: MiniCluster, decoder: str) -> None:
    for name, outcome in cluster.outcomes.items():
        expected = plain.outcomes[name.split()[0]]
        assert outcome.tokens == expected.tokens, name
        assert outcome.logits.keys() == expected.logits.keys(), name
        for position, logits in outcome.logits.items():
            assert torch.equal(logits, expected.logits[position]), (name, position)
    counters = cluster.nodes[decoder].instance.counters
    assert counters["accepted_draft_tokens"] > 50
    assert counters["draft_tokens"] > counters["accepted_draft_tokens"]


@pytest.mark.parametrize("chunk_tokens", [1024, 24])
def test_alone(lab: SpeculationLab, plain: MiniCluster, chunk_tokens: int) -> None:
    cluster = lab({"one": Role.MIXED}, chunk_tokens=chunk_tokens, speculative=ALL_TOKENS)
    for work in works():
        cluster.submit(work, on="one")
        cluster.run()
    assert_as_plain(cluster, plain, "one")


def test_in_a_crowd_beside_chunks(lab: SpeculationLab, plain: MiniCluster) -> None:
    cluster = lab({"one": Role.MIXED}, chunk_tokens=40, speculative=ALL_TOKENS)
    for work in works():
        cluster.submit(work, on="one")
    cluster.run()
    assert_as_plain(cluster, plain, "one")


def test_split_into_prefill_and_decode(lab: SpeculationLab, plain: MiniCluster) -> None:
    cluster = lab({"p": Role.PREFILL, "d": Role.DECODE}, speculative=ALL_TOKENS)
    for number, work in enumerate(works()):
        cluster.submit(work, on="p", decode="d")
        if number % 5 == 4:
            cluster.run()
    cluster.run()
    assert_as_plain(cluster, plain, "d")
    assert "draft_tokens" not in cluster.nodes["p"].instance.counters


def test_by_what_cached_blocks_say(lab: SpeculationLab, plain: MiniCluster) -> None:
    """The prompt has no repeated run of 32 tokens, so drafts can only come from cached blocks."""
    long = SpeculativeConfig(method="ngram", prompt_lookup_min=32, prompt_lookup_max=32)
    cluster = lab({"one": Role.MIXED}, speculative=long)
    rng = random.Random(5)
    prompt = tuple(rng.randrange(300) for _ in range(37))
    for name in ("first", "again"):
        work = works()[1]
        sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=100)
        changed = {"attempt_id": AttemptId(name), "token_ids": prompt, "num_prompt_tokens": 37}
        cluster.submit(msgspec.structs.replace(work, sampling=sampling, **changed), on="one")
        cluster.run()
        counters = cluster.nodes["one"].instance.counters
        assert counters.get("accepted_draft_tokens", 0) == 0 or name == "again"
    first, again = (cluster.outcomes[name] for name in ("first", "again"))
    assert again.tokens == first.tokens and len(again.tokens) == 100
    for position, logits in again.logits.items():
        assert torch.equal(logits, first.logits[position])
    assert counters["accepted_draft_tokens"] > 50
    assert counters["draft_tokens"] == counters["accepted_draft_tokens"]


BY_MODEL = SpeculativeConfig(
    method="draft_model",
    model="of the test",
    num_speculative_tokens=3,
    prompt_lookup_min=9,
    prompt_lookup_max=9,
)
OTHER = MODEL.replace("layers=3", "layers=1") + ",seed=5"
CHEAP_DRAFTS = FittedCost(prefill=(0.0, 1e-6, 0.0, 0.0), decode=(1e-4, 1e-6, 0.0))


@pytest.mark.parametrize("draft_blocks", [400, 12])
@pytest.mark.parametrize(
    "roles", [{"one": Role.MIXED}, {"p": Role.PREFILL, "d": Role.DECODE}], ids=len
)
def test_by_a_draft_model_that_is_the_model(
    lab: SpeculationLab, plain: MiniCluster, roles: dict[str, Role], draft_blocks: int
) -> None:
    """With few blocks for the draft model, requests must take blocks from each other, or decode
    without drafts."""
    cluster = lab(
        roles,
        speculative=BY_MODEL,
        draft_model=MODEL,
        draft_blocks=draft_blocks,
        draft_cost=CHEAP_DRAFTS,
        chunk_tokens=40,
    )
    first, last = next(iter(roles)), [*roles][-1]
    for number, work in enumerate(works()):
        cluster.submit(work, on=first, decode=last if last != first else None)
        if number % 5 == 4:
            cluster.run()
    cluster.run()
    assert_as_plain(cluster, plain, last)


def test_greedy_guesses_of_the_model_itself_are_all_right(lab: SpeculationLab) -> None:
    """Shows that the draft model's own KVCache is right, because a mistake in it makes drafts
    wrong, which no other test would notice."""
    cluster = lab(
        {"one": Role.MIXED},
        speculative=msgspec.structs.replace(BY_MODEL, prompt_lookup_min=32, prompt_lookup_max=32),
        # disables lookups in cached blocks, so all drafts come from the model
        prefix_caching=False,
        draft_model=MODEL,
        draft_blocks=400,
        draft_cost=CHEAP_DRAFTS,
        chunk_tokens=24,
    )
    for work in works():
        greedy = SamplingParams(temperature=0.0, max_tokens=60)
        cluster.submit(msgspec.structs.replace(work, sampling=greedy), on="one")
    cluster.run()
    counters = cluster.nodes["one"].instance.counters
    assert counters["accepted_draft_tokens"] == counters["draft_tokens"] > 150


@pytest.mark.long
def test_by_a_draft_model_that_knows_nothing(lab: SpeculationLab, plain: MiniCluster) -> None:
    cluster = lab(
        {"one": Role.MIXED},
        speculative=BY_MODEL,
        draft_model=OTHER,
        draft_blocks=400,
        draft_cost=CHEAP_DRAFTS,
    )
    for work in works():
        cluster.submit(work, on="one")
        cluster.run()
    counters = cluster.nodes["one"].instance.counters
    assert counters["accepted_draft_tokens"] < 0.3 * counters["draft_tokens"]
    for name, outcome in cluster.outcomes.items():
        assert outcome.tokens == plain.outcomes[name].tokens, name

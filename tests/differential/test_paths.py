"""Logits are bitwise equal on every way of a request: one instance without cache, chunked at any
size, in a large batch, split into prefill and decode over either transport, with a prefix from the
instance's own cache or from another's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import AttemptSpec
from moonpool.types import Role, SamplingParams
from moonpool_engine.engine import native
from moonpool_engine.engine.ops import Ops
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.transfer import context as transfer_context
from moonpool_engine.transfer.shm import ShmConnection
from moonpool_lab.solo import solo_attempt
from tests.differential.checkpoints import CASES, save
from tests.differential.cluster import MiniCluster, Outcome

FEW_PROMPTS = 20
"""The number of prompts in `make test`: all lengths around block and chunk bounds, and some
more."""
NUM_PROMPTS = {"native": 60, "native-int8": 30}
"""The number of prompts in the long run, by operations."""
NUM_TOKENS = 6


def make_ops(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    missing = native.available()
    if missing is not None:
        pytest.skip(missing)
    from moonpool_engine.engine.native.ops import NativeOps

    return NativeOps(quantization="int8" if name == "native-int8" else "none")


def make_prompts(count: int) -> list[list[int]]:
    """Makes prompts with lengths around block and chunk bounds and at random; every second prompt
    shares a prefix."""
    rng = random.Random(4)
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
    lengths += [rng.randrange(1, 250) for _ in range(count - len(lengths))]
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        shared = prompts[-1][: rng.randrange(len(prompts[-1]) + 1)] if i % 2 else []
        prompts.append(shared + [rng.randrange(300) for _ in range(length)])
    return prompts


def work(name: str, prompt: list[int]) -> AttemptSpec:
    sampling = SamplingParams(temperature=0.8, seed=len(prompt), max_tokens=NUM_TOKENS)
    return solo_attempt(name, tuple(prompt), sampling)


@dataclass
class Lab:
    """Makes clusters of one kind of operations and dtype."""

    ops: Ops
    dtype: str
    prompts: list[list[int]]
    clusters: list[MiniCluster]
    model: dict[str, str]  # the option `--model`; empty means the options of the clusters

    def __call__(self, roles: dict[str, Role], **options: object) -> MiniCluster:
        options = self.model | options
        self.clusters.append(MiniCluster(roles, self.dtype, self.ops, **options))
        return self.clusters[-1]


KINDS = [(o, d) for o in ("reference", "native") for d in ("float32", "bfloat16")]
KINDS.append(("native-int8", "bfloat16"))
LINEAR = "qwen3.5"
"""A case whose blocks hold states of linear attention."""
VARIANTS = [pytest.param((*kind, FEW_PROMPTS, ""), id="-".join(kind)) for kind in KINDS]
VARIANTS += [
    pytest.param(("native", "float32", FEW_PROMPTS, LINEAR), id=f"native-float32-{LINEAR}"),
    pytest.param(
        ("native", "bfloat16", FEW_PROMPTS, LINEAR),
        id=f"native-bfloat16-{LINEAR}",
        marks=pytest.mark.long,
    ),
]
VARIANTS += [
    pytest.param(
        (*kind, NUM_PROMPTS[kind[0]], ""), id="-".join((*kind, "many")), marks=pytest.mark.long
    )
    for kind in KINDS
    if kind[0] in NUM_PROMPTS  # fewer prompts for the reference operations, which are slow
]


@pytest.fixture(scope="module", params=VARIANTS)
def build(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    name, dtype, num_prompts, case = request.param
    model = {}
    if case:
        folder = tmp_path_factory.mktemp("model")
        save(CASES[case], folder)
        model["model"] = str(folder)
    lab = Lab(make_ops(name), dtype, make_prompts(num_prompts), [], model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lab
    torch.set_num_threads(threads)
    for cluster in lab.clusters:
        cluster.close()


@pytest.fixture(scope="module")
def alone(build: Lab) -> list[Outcome]:
    """Returns the reference: each prompt alone, in one piece, on one instance, without cache."""
    cluster = build({"one": Role.MIXED}, chunk_tokens=1024, prefix_caching=False)
    for i, prompt in enumerate(build.prompts):
        cluster.submit(work(str(i), prompt), on="one")
        cluster.run()
    return [cluster.outcomes[str(i)] for i in range(len(build.prompts))]


def assert_same(got: list[Outcome], expected: list[Outcome]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.tokens == b.tokens, i
        assert a.logits.keys() == b.logits.keys(), i
        for position, logits in a.logits.items():
            assert torch.isfinite(logits).all(), (i, position)
            assert torch.equal(logits, b.logits[position]), (i, position)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 50])
def test_chunked_and_in_a_crowd(build: Lab, alone: list[Outcome], chunk_tokens: int) -> None:
    cluster = build({"one": Role.MIXED}, chunk_tokens=chunk_tokens, prefix_caching=False)
    for i, prompt in enumerate(build.prompts):
        cluster.submit(work(str(i), prompt), on="one")
    cluster.run()
    assert_same([cluster.outcomes[str(i)] for i in range(len(build.prompts))], alone)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_split_into_prefill_and_decode(
    build: Lab, alone: list[Outcome], shared_memory: bool
) -> None:
    cluster = build({"p": Role.PREFILL, "d": Role.DECODE}, shared_memory=shared_memory)
    for i, prompt in enumerate(build.prompts):
        cluster.submit(work(str(i), prompt), on="p", decode="d")
        if i % 5 == 4:
            cluster.run()
    cluster.run()
    outcomes = [cluster.outcomes[str(i)] for i in range(len(build.prompts))]
    assert_same(outcomes, alone)
    assert sum(o.transferred_bytes for o in outcomes) > 0
    assert cluster.corrupt_slices == 0
    assert any(o.cached_tokens for o in outcomes)


def test_prefix_from_the_own_cache(build: Lab, alone: list[Outcome]) -> None:
    cluster = build({"one": Role.MIXED}, chunk_tokens=40)
    size = cluster.block_tokens
    for i, prompt in enumerate(build.prompts):
        for round_name in ("first", "again"):
            cluster.submit(work(f"{i} {round_name}", prompt), on="one")
            cluster.run()
    again = [cluster.outcomes[f"{i} again"] for i in range(len(build.prompts))]
    assert_same(again, alone)
    for outcome, prompt in zip(again, build.prompts, strict=True):
        assert outcome.cached_tokens == (len(prompt) - 1) // size * size


@pytest.mark.parametrize("holder", ["p", "d"])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_prefix_from_another_instance(
    build: Lab, alone: list[Outcome], holder: str, shared_memory: bool
) -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    cluster = build(roles, shared_memory=shared_memory)
    size = cluster.block_tokens
    prompts = build.prompts
    for i, prompt in enumerate(prompts):
        cluster.submit(work(f"{i} first", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} again", prompt), on="q", decode="e", fetch_from=holder)
        cluster.run()
    again = [cluster.outcomes[f"{i} again"] for i in range(len(build.prompts))]
    assert_same(again, alone)
    for outcome, prompt in zip(again, prompts, strict=True):
        assert outcome.cached_tokens == (len(prompt) - 1) // size * size
    assert sum(o.fetched_tokens for o in again) > 300


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_damaged_slices_are_computed_again(
    build: Lab, alone: list[Outcome], shared_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ShmConnection, "defers_checksums", False
    )  # A source with wrong checksums then reports all blocks that it sends as damaged.
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE}
    cluster = build(roles, shared_memory=shared_memory, liars={"p"})
    for i, prompt in enumerate(build.prompts):
        cluster.submit(work(f"{i} streamed", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} fetched", prompt), on="q", decode="d", fetch_from="p")
        cluster.run()
    for way in ("streamed", "fetched"):
        outcomes = [cluster.outcomes[f"{i} {way}"] for i in range(len(build.prompts))]
        assert_same(outcomes, alone)
    assert cluster.corrupt_slices > 0
    assert cluster.nodes["d"].instance.counters["recomputed_tokens"] > 0
    assert cluster.nodes["q"].instance.counters["corrupt_slices"] > 0


EAGER = FittedCost(prefill=(9.0, 0.0, 0.0, 0.0), decode=(0.0, 0.0, 0.0))
"""Makes prompts seem so long that every transfer is in time: all requests begin early."""


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_computed_while_the_prefix_arrives(
    build: Lab, alone: list[Outcome], shared_memory: bool
) -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    cluster = build(roles, shared_memory=shared_memory, cost=EAGER, layer_wise_load=True)
    prompts = build.prompts
    for i, prompt in enumerate(prompts):
        cluster.submit(work(f"{i} first", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} again", prompt), on="q", decode="e", fetch_from="p")
        if i % 3 == 2:
            cluster.run()
    cluster.run()
    again = [cluster.outcomes[f"{i} again"] for i in range(len(prompts))]
    assert_same(again, alone)
    assert cluster.nodes["q"].instance.counters["early_prefills"] > len(prompts) / 4
    assert cluster.missed_steps == 0
    assert sum(o.fetched_tokens for o in again) > 300


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_damaged_while_computed_with(
    build: Lab, alone: list[Outcome], shared_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damages slices now and then while a step reads them, so that steps are repeated; no token may
    be wrong."""
    monkeypatch.setattr(ShmConnection, "defers_checksums", False)
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    options = {"shared_memory": shared_memory, "cost": EAGER, "layer_wise_load": True}
    cluster = build(roles, liars={"p"}, **options)
    for i, prompt in enumerate(build.prompts):
        cluster.submit(work(f"{i} first", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} again", prompt), on="q", decode="e", fetch_from="p")
        cluster.run()
    assert_same([cluster.outcomes[f"{i} again"] for i in range(len(build.prompts))], alone)
    counters = cluster.nodes["q"].instance.counters
    assert cluster.missed_steps == counters["missed_steps"] > 0
    assert counters["corrupt_slices"] > 0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_the_source_goes_while_it_is_computed_with(
    build: Lab, alone: list[Outcome], shared_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's messenger ends after a few slices, while a step waits for the rest."""
    monkeypatch.setattr(transfer_context, "FRAME_BYTES", 1)  # makes each slice a message of its own
    options = {"shared_memory": shared_memory, "cost": EAGER, "layer_wise_load": True}
    longest = max(range(len(build.prompts)), key=lambda i: len(build.prompts[i]))
    prompt = build.prompts[longest]
    cluster = build({"p": Role.MIXED, "q": Role.MIXED}, leaves_after={"p": 7}, **options)
    cluster.submit(work("first", prompt), on="p")
    cluster.run()
    cluster.submit(work("again", prompt), on="q", fetch_from="p")
    cluster.run()
    assert_same([cluster.outcomes["again"]], [alone[longest]])
    assert cluster.missed_steps == 1

"""On every way of a request between instances on a GPU, the logits of its tokens equal those of one
instance without a cache: bit by bit with moonpool's kernels, up to rounding with torch's.

torch's operations on the CPU make the same copies between device and arena, so these tests run
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moonpool.types import Role
from moonpool_engine.transfer.shm import ShmConnection
from tests.differential.cluster import MiniCluster, Outcome
from tests.differential.test_paths import make_prompts, work
from tests.gpu.backends import BACKENDS, difference, make_ops

PROMPTS = make_prompts(30)


class Lab:
    """Makes clusters of one kind of operations and dtype."""

    def __init__(self, backend: str, dtype: str) -> None:
        self.ops = make_ops(backend)
        self.dtype = dtype
        self.exact = backend.startswith("triton")
        self.clusters: list[MiniCluster] = []

    def __call__(self, roles: dict[str, Role], **options: object) -> MiniCluster:
        self.clusters.append(MiniCluster(roles, self.dtype, self.ops, **options))
        return self.clusters[-1]

    def check(self, got: list[Outcome], expected: list[Outcome]) -> None:
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.tokens == b.tokens, i
            assert a.logits.keys() == b.logits.keys(), i
            for position, logits in a.logits.items():
                if self.exact:
                    assert torch.isfinite(logits).all(), (i, position)
                    assert torch.equal(logits, b.logits[position]), (i, position)
                else:
                    assert difference(logits, b.logits[position]) < 1e-5, (i, position)


VARIANTS = [(backend, "float32") for backend in BACKENDS] + [("triton-cuda", "bfloat16")]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def build(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(*request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lab
    torch.set_num_threads(threads)
    for cluster in lab.clusters:
        cluster.close()


@pytest.fixture(scope="module")
def alone(build: Lab) -> list[Outcome]:
    cluster = build({"one": Role.MIXED}, chunk_tokens=1024, prefix_caching=False)
    for i, prompt in enumerate(PROMPTS):
        cluster.submit(work(str(i), prompt), on="one")
        cluster.run()
    return outcomes(cluster)


def outcomes(cluster: MiniCluster, way: str = "") -> list[Outcome]:
    return [cluster.outcomes[f"{i}{way}"] for i in range(len(PROMPTS))]


@pytest.mark.long
@pytest.mark.parametrize("chunk_tokens", [7, 50])
def test_chunked_in_a_crowd_with_a_cache(
    build: Lab, alone: list[Outcome], chunk_tokens: int
) -> None:
    cluster = build({"one": Role.MIXED}, chunk_tokens=chunk_tokens)
    for round_name in (" first", " again"):
        for i, prompt in enumerate(PROMPTS):
            cluster.submit(work(f"{i}{round_name}", prompt), on="one")
        cluster.run()
        build.check(outcomes(cluster, round_name), alone)
    assert any(o.cached_tokens for o in outcomes(cluster, " again"))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])
def test_split_into_prefill_and_decode(
    build: Lab, alone: list[Outcome], shared_memory: bool
) -> None:
    cluster = build({"p": Role.PREFILL, "d": Role.DECODE}, shared_memory=shared_memory)
    for i, prompt in enumerate(PROMPTS):
        cluster.submit(work(str(i), prompt), on="p", decode="d")
        if i % 5 == 4:
            cluster.run()
    cluster.run()
    build.check(outcomes(cluster), alone)
    assert sum(o.transferred_bytes for o in outcomes(cluster)) > 0
    assert cluster.corrupt_slices == 0


@pytest.mark.long
@pytest.mark.parametrize("holder", ["p", "d"])
def test_prefix_from_another_instance(build: Lab, alone: list[Outcome], holder: str) -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    cluster = build(roles)
    for i, prompt in enumerate(PROMPTS):
        cluster.submit(work(f"{i} first", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} again", prompt), on="q", decode="e", fetch_from=holder)
        cluster.run()
    build.check(outcomes(cluster, " again"), alone)
    assert sum(o.fetched_tokens for o in outcomes(cluster, " again")) > 300


@pytest.mark.long
def test_damaged_slices_are_computed_again(
    build: Lab, alone: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ShmConnection, "defers_checksums", False
    )  # A source with wrong checksums then reports all blocks that it sends as damaged.
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE}
    cluster = build(roles, liars={"p"})
    for i, prompt in enumerate(PROMPTS):
        cluster.submit(work(f"{i} streamed", prompt), on="p", decode="d")
        cluster.run()
        cluster.submit(work(f"{i} fetched", prompt), on="q", decode="d", fetch_from="p")
        cluster.run()
    build.check(outcomes(cluster, " streamed"), alone)
    build.check(outcomes(cluster, " fetched"), alone)
    assert cluster.corrupt_slices > 0

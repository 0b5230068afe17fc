"""Tests groups of nodes: the time of one prompt on each kind of group, and a cluster of groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.config.tables import Parallelism
from moonpool.sim.hardware.calibrated import SHAPE
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from papers.constants import shape_of
from papers.finding import Finding, figures
from papers.mooncake import workload as mooncake_workload
from papers.mooncake.cpp import (
    ALONE,
    CLUSTER_NODES,
    KINDS,
    LENGTHS,
    NODES,
    alone,
    group_nic_bytes,
    serve_groups,
)
from papers.mooncake.workload import MooncakeWorkload
from papers.options import MissingTraceError, Options
from papers.registry import run

NUM_REQUESTS = 80


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr(mooncake_workload, "MOONCAKE_QUICK_REQUESTS", NUM_REQUESTS)
    rows = generate(BUILT_IN["conversation"], num_requests=2 * NUM_REQUESTS, seed=1)
    write_trace(rows, tmp_path / "conversation_trace.jsonl")
    return Options(quick=True, folders=(tmp_path,))


def held(finding: Finding) -> dict[str, bool]:
    return {check.text.split(":")[0].split(" (")[0]: check.holds for check in finding.checks}


@pytest.mark.long
def test_the_papers_claims_and_what_does_not_hold(options: Options) -> None:
    finding = run("mooncake-cpp", options)
    claims = held(finding)
    assert (
        claims.pop("a long prompt alone is faster with CPP than with TP+SP and a perfect ring")
        is False
    )
    alone_claims = [text for text in claims if not text.startswith("in the cluster")]
    assert len(alone_claims) == 5 and all(claims[text] for text in alone_claims), claims
    assert claims["in the cluster, CPP and PP leave the NICs to KVCache more than the others do"]
    assert claims["in the cluster, CPP's mean TTFT is below TP's"]
    assert f"the first {NUM_REQUESTS} requests" in finding.chosen_inputs[0]


@pytest.mark.long
def test_rows_are_ours_alone_but_for_the_papers_one_number(options: Options) -> None:
    finding = run("mooncake-cpp", options)
    printed = [row for row in finding.rows if row.paper is not None]
    assert [row.paper for row in printed] == [2.0]
    assert printed[0].ours == pytest.approx(2.0)
    assert len({row.label for row in finding.rows}) == len(finding.rows)
    assert figures(run("mooncake-cpp", options)) == figures(finding)


def test_without_the_trace_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingTraceError, match="trace download"):
        run("mooncake-cpp", Options(folders=(tmp_path,)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_is_the_same_of_every_kind_and_sends_nothing(kind: Parallelism) -> None:
    found = alone(8_192, 1, kind)
    assert found == alone(8_192, 1, "tp")
    assert found.nic_bytes == 0
    assert found.latency_s == found.nodes_s


def test_only_chunks_fill_the_stages() -> None:
    for length in LENGTHS:
        one = alone(length, 1, "pp").latency_s
        for nodes in NODES:
            assert alone(length, nodes, "pp").latency_s >= one
            assert one / alone(length, nodes, "cpp").latency_s < nodes
    assert alone(2_048, 4, "cpp") == alone(2_048, 4, "pp")  # one chunk
    assert alone(65_536, 4, "cpp").latency_s < 0.35 * alone(65_536, 4, "pp").latency_s


def test_the_clusters_groups_have_as_many_nodes_and_their_bytes_are_added_up() -> None:
    rows = [
        TraceRow(20.0 * n, 16_384, 5, tuple(range(100 * n, 100 * n + 32))) for n in range(3)
    ] + [TraceRow(80.0, 20_480, 5, tuple(range(40)))]
    workload = MooncakeWorkload("made-up", rows, BLOCK_TOKENS, False, "")
    apart = serve_groups(workload, ALONE, 0)
    joined = serve_groups(workload, "cpp", 0)
    assert len(joined.served.simulation.nodes) == len(apart.served.simulation.nodes) - 4
    assert apart.group_share == 0
    assert joined.served.ttft_s < 0.7 * apart.served.ttft_s
    found = joined.served.simulation.collector
    assert found.hit_tokens == 16_384  # the last prompt begins with the first prompt
    tokens = found.input_tokens - found.hit_tokens
    sent = group_nic_bytes(shape_of(SHAPE), CLUSTER_NODES, "cpp", tokens)
    each = [(16_384, 0)] * 3 + [(20_480, 16_384)]
    one_by_one = [group_nic_bytes(shape_of(SHAPE), CLUSTER_NODES, "cpp", *pair) for pair in each]
    assert sent == pytest.approx(sum(one_by_one))
    more = serve_groups(workload, "tp", 0)
    ratio = more.group_share / joined.group_share
    ends = joined.served.simulation.last_end_s / more.served.simulation.last_end_s
    assert ratio == pytest.approx(4 * 80 * ends)  # all-reduces of 80 layers, against one hop

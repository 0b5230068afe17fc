"""Runs each of Mooncake's experiments on a short workload, checks its inputs, and compares the
figures that follow from arithmetic alone with the papers."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest

from moonpool.sim.hardware.calibrated import SHAPE
from moonpool.trace.blocks import prompt_keys
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from papers.constants import MOONCAKE_RATE_STEPS, RATE_SPEEDS, device_of, shape_of
from papers.finding import Finding, FindingRow, figures
from papers.mooncake import hit_ratio as mooncake_hit_ratio
from papers.mooncake import latency as mooncake_latency
from papers.mooncake import layer_wise as mooncake_layer_wise
from papers.mooncake import reuse as mooncake_reuse
from papers.mooncake import table1 as mooncake_table1
from papers.mooncake import workload as mooncake_workload
from papers.mooncake.replicas import ranked_keys
from papers.mooncake.runs import (
    SYSTEMS,
    cluster,
    faster,
    serve,
    speed_with,
    system,
)
from papers.mooncake.workload import (
    MooncakeWorkload,
    find_v3_workload,
    find_workload,
    read_one_of,
    read_workload,
)
from papers.options import MissingTraceError, Options
from papers.registry import EXPERIMENTS, run

pytestmark = pytest.mark.long

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
needs_trace = pytest.mark.skipif(
    not (TRACES / "conversation_trace.jsonl").exists(), reason="the conversation trace is not here"
)
NUM_REQUESTS = 60
MOONCAKE = tuple(name for name in EXPERIMENTS if name.startswith("mooncake-"))
GENERATED = tuple(
    f"mooncake-{name}"
    for name in (
        "effective",
        "hit-ratio",
        "network",
        "prefill-time",
        "ratio",
        "replicas",
        "v3-fig8",
        "v3-fig13",
    )
)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Runs quickly, with a short conversation trace, and without the other traces."""
    monkeypatch.setattr(mooncake_workload, "MOONCAKE_QUICK_REQUESTS", NUM_REQUESTS)
    rows = generate(BUILT_IN["conversation"], num_requests=2 * NUM_REQUESTS, seed=1)
    write_trace(rows, tmp_path / "conversation_trace.jsonl")
    return Options(quick=True, folders=(tmp_path,))


def made_up(*rows: TraceRow) -> MooncakeWorkload:
    return MooncakeWorkload("made-up", rows, BLOCK_TOKENS, False, "")


def row(finding: Finding, label: str) -> FindingRow:
    return next(each for each in finding.rows if each.label == label)


@pytest.mark.parametrize("name", MOONCAKE)
def test_every_experiment_runs_and_says_what_it_was_given(name: str, options: Options) -> None:
    finding = run(name, options)
    assert finding.rows and finding.checks and finding.panels
    assert any(each.paper is not None for each in finding.rows)
    assert all(isfinite(each.ours) and each.ours >= 0 for each in finding.rows), finding.rows
    assert len({each.label for each in finding.rows}) == len(finding.rows)
    said = " ".join(finding.chosen_inputs)
    if name in GENERATED:
        assert "not at hand" in said
    assert figures(finding)["rows"][0]["label"] == finding.rows[0].label


def test_what_was_generated_says_so_and_what_was_read_too(options: Options) -> None:
    read = read_workload(options, "conversation")
    assert len(read.rows) == NUM_REQUESTS
    assert read.is_original and "first 60" in read.origin
    made = find_workload(options, "synthetic")
    assert not made.is_original and made.title == "synthetic-like"
    assert "not at hand" in made.origin and "15,325" in made.origin
    assert "v3's trace is not at hand" in find_v3_workload(options).origin


def test_an_original_is_preferred_to_a_generated_one(options: Options) -> None:
    (folder,) = options.folders
    write_trace([TraceRow(0.0, 600, 3, (1, 2))], folder / "synthetic_trace.jsonl")
    found = find_workload(options, "synthetic")
    assert found.is_original and found.rows[0].input_tokens == 600
    assert read_one_of(options, "mooncake", "conversation").name == "conversation"
    write_trace([TraceRow(0.0, 700, 3, (1, 2))], folder / "mooncake_trace.jsonl")
    assert read_one_of(options, "mooncake", "conversation").rows[0].input_tokens == 700
    assert find_v3_workload(options).name == "mooncake"


def test_a_named_trace_is_what_its_file_is_called(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "synthetic_trace.jsonl"
    write_trace([TraceRow(0.0, 600, 3, (1, 2))], path)
    named = Options(quick=True, trace=path)
    assert find_workload(named, "synthetic").is_original
    assert not find_workload(named, "toolagent").is_original
    assert read_one_of(named, "mooncake", "conversation").name == "conversation"


def test_without_the_conversation_trace_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingTraceError, match="trace download"):
        run("mooncake-placement", Options(folders=(tmp_path,)))


def test_the_least_bandwidth_for_reuse_is_the_papers() -> None:
    finding = mooncake_reuse.run(Options())
    assert row(finding, "8 x A800-SXM: Eq. 2").ours == pytest.approx(5.86, abs=0.005)
    assert row(finding, "8 x H800: Eq. 2").ours == pytest.approx(18.6, abs=0.05)
    assert all(check.holds for check in finding.checks)
    shape, peak = shape_of(SHAPE), mooncake_reuse.peak_flops_per_s(device_of("A800-SXM"))
    # At that bandwidth, the transfer of a prefix takes as long as its computation (Eq. 1).
    hidden, tokens = shape.hidden, 4096
    flops = shape.layers * (4 * tokens**2 * hidden + 22 * tokens * hidden**2)
    moved_s = tokens * shape.kv_bytes_per_token
    moved_s /= mooncake_reuse.least_bytes_per_s(shape, peak, tokens)
    assert moved_s == pytest.approx(flops / peak)


def test_one_request_takes_the_papers_times() -> None:
    finding = mooncake_latency.run(Options())
    assert all(each.verdict in ("within 10 %", "within 25 %") for each in finding.rows)
    assert all(check.holds for check in finding.checks)


def test_layer_wise_hides_what_serialized_adds() -> None:
    finding = mooncake_layer_wise.run(Options())
    assert row(finding, "128k: serialized").ours == pytest.approx(
        131_072 * 327_680 / 87e9, rel=0.01
    )
    assert row(finding, "128k: layer-wise").ours < 0.01
    assert all(check.holds for check in finding.checks)


def test_faster_is_the_same_requests_closer_together() -> None:
    rows = [TraceRow(1.0, 600, 3, (1, 2)), TraceRow(3.0, 700, 3, (1, 3))]
    assert [each.arrived_s for each in faster(rows, 2.0)] == [0.5, 1.5]
    assert [each.input_tokens for each in faster(rows, 2.0)] == [600, 700]
    assert faster(rows, 1.0) is rows


def test_vllm_decodes_wait_for_whole_prompts_and_less_for_chunks() -> None:
    long_answers = [
        TraceRow(0.0, 1_000, 200, (1, 2)),
        TraceRow(1.0, 30_000, 5, tuple(range(3, 62))),
    ]
    share = {}
    for name in SYSTEMS:
        overrides = system(name, 1 if name != "Mooncake" else 2)
        served = serve(made_up(*long_answers), overrides, 0)
        assert served.completed_share == 1.0
        share[name] = served.simulation.collector.gap_s.largest
    assert share["vLLM"] > 3.0  # vLLM computes the prompt of 30,000 tokens in one step
    assert share["vLLM chunked prefill"] < 0.2
    assert share["Mooncake"] < 0.1 + share["vLLM chunked prefill"]


def test_only_the_prefix_cache_of_vllm_finds_a_prompt_again() -> None:
    again = [TraceRow(0.0, 4_096, 5, tuple(range(8))), TraceRow(60.0, 4_200, 5, tuple(range(9)))]
    ratios = {name: serve(made_up(*again), system(name, 2), 0).hit_ratio for name in SYSTEMS[1:]}
    assert ratios["vLLM"] == ratios["vLLM chunked prefill"] == 0.0
    # The queues are empty both times. The instance that has been idle longest is the other one.
    one = serve(made_up(*again), system("vLLM prefix caching", 1), 0)
    assert one.hit_ratio == pytest.approx(4_096 / 8_296)


def test_a_share_within_a_limit_counts_every_request() -> None:
    rows = [TraceRow(0.0, 1_000, 50, (1, 2)), TraceRow(5.0, 1_000, 1, (3, 4))]
    served = serve(made_up(*rows), cluster(1, 1), 0)
    assert served.share_within(10.0) == 1.0
    # counts as within, because an answer of one token has no gap
    assert served.share_within(0.001) == 0.5


def test_a_slower_network_is_believed_and_true() -> None:
    rows = [TraceRow(0.0, 16_384, 5, tuple(range(32)))]
    fast, slow = (
        serve(made_up(*rows), cluster(1, 1), 0, nic_bytes_per_s=rate) for rate in (87e9, 1e9)
    )
    assert slow.simulation.hardware.prefill.estimate.network_bytes_per_s == 1e9
    assert slow.ttft_s - fast.ttft_s > 16_384 * 327_680 / 1e9 - 3, "it waits for its KVCache"


def test_the_rate_is_found_by_halving() -> None:
    low, high = RATE_SPEEDS
    found = speed_with(Options(), lambda speed: speed * speed, 4.0)
    assert found == pytest.approx(2.0, abs=(high - low) / 2**MOONCAKE_RATE_STEPS)
    assert speed_with(Options(), lambda speed: 0.0, 4.0) == pytest.approx(high, rel=0.01)


def test_keys_are_ranked_by_use_then_by_age() -> None:
    rows = [TraceRow(0.0, 1_536, 1, (0, 1, 2)), TraceRow(1.0, 1_100, 1, (0, 1, 3))]
    # Partial blocks do not count as blocks of the pool. Both full blocks are used twice.
    assert ranked_keys(made_up(*rows), 256, 10) == [
        prompt_keys((name,), 512, 512, 256)[0] for name in (0, 1, 2)
    ]


def test_a_trace_that_is_not_the_papers_is_not_taken_for_it(options: Options) -> None:
    finding = mooncake_table1.run(options)
    assert all("another trace" in each.note for each in finding.rows if each.paper is not None)
    assert finding.notes
    (folder,) = options.folders
    rows = generate(BUILT_IN["conversation"], num_requests=NUM_REQUESTS, seed=1)
    write_trace(rows, folder / "mooncake_trace.jsonl")
    assert not mooncake_table1.run(options).notes


@needs_trace
@pytest.mark.long
def test_hit_ratios_are_fast_25s_within_four_hundredths() -> None:
    options = Options(folders=(TRACES,))
    workload = read_workload(options, "conversation")
    found = mooncake_hit_ratio.curve(workload, (5_000_000, None))
    papers = (mooncake_hit_ratio.FIG_9["conversation"][i] for i in (5, -1))
    for ours, paper in zip(found, papers, strict=True):
        assert ours == pytest.approx(paper, abs=mooncake_hit_ratio.TOLERANCE)

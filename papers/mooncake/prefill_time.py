"""FAST'25 Fig. 8: the GPU time that a prompt takes, Mooncake against vLLM."""

from __future__ import annotations

from papers.constants import MOONCAKE_NODES
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import SYSTEMS, VLLM_INPUTS, ClusterRun, System, serve, system
from papers.mooncake.workload import TITLES, MooncakeWorkload, find_workload, read_workload
from papers.options import Options
from papers.plot import Panel, bars

PAPER: dict[str, dict[System, float]] = {  # mean, s
    "conversation": {
        "Mooncake": 1.062,
        "vLLM": 1.661,
        "vLLM prefix caching": 1.523,
        "vLLM chunked prefill": 2.021,
    },
    "synthetic": {
        "Mooncake": 0.733,
        "vLLM": 2.022,
        "vLLM prefix caching": 1.896,
        "vLLM chunked prefill": 2.436,
    },
}
TOLERANCE = 0.10
Found = dict[str, dict[System, ClusterRun]]


def run(options: Options) -> Finding:
    workloads = [read_workload(options, "conversation"), find_workload(options, "synthetic")]
    found: Found = {}
    for workload in workloads:
        found[workload.name] = {}
        for name in SYSTEMS:
            options.progress(f"{workload.title}, {name}")
            overrides = system(name, MOONCAKE_NODES)
            found[workload.name][name] = serve(workload, overrides, options.seed)
    return Finding(
        name="mooncake-prefill-time",
        title="GPU time of a prompt",
        source="Mooncake, FAST'25 Fig. 8",
        paper_inputs=("16 nodes; vLLM v0.5.1 plain, with prefix caching, with chunked prefill",),
        chosen_inputs=(
            *(workload.origin for workload in workloads),
            "Mooncake: 8 prefill and 8 decode nodes, none turned away; each trace's own speed",
            *VLLM_INPUTS,
            (
                "GPU time of a prompt: its share, by prompt tokens, of what its steps took longer "
                "than their decodes alone would have"
            ),
        ),
        rows=_rows(found, {workload.name for workload in workloads if workload.is_original}),
        checks=_checks(found["conversation"]),
        notes=NOTES,
        panels=tuple(_panel(workload, found[workload.name]) for workload in workloads),
    )


NOTES = (
    (
        "Prefill times are those measured for Fig. 14 (one request at a time): an independent "
        "source for these means."
    ),
    (
        "The paper does not say how much vLLM's prefix cache held, nor how requests were routed; "
        "ours has all memory that the weights leave, and a router that does not look for hits."
    ),
    (
        "With chunks the paper's vLLM takes 0.36 s more than without on conversation, 15 ms for "
        "each chunk of 512 tokens. In our cost model a chunk shares the read of the weights with "
        "the decodes in its step: ours comes out below plain vLLM."
    ),
)


def _rows(found: Found, original: set[str]) -> tuple[FindingRow, ...]:
    rows = []
    for workload, by in found.items():
        title = TITLES[workload] + ("" if workload in original else "-like")
        for name, served in by.items():
            note = f"hits {served.hit_ratio:.3f}"
            paper = PAPER[workload][name]
            rows.append(FindingRow(f"{title}, {name}", "s", paper, served.prefill_s, note))
        papers = PAPER[workload]
        rows.append(
            FindingRow(
                f"{title}, Mooncake over vLLM",
                "x",
                papers["Mooncake"] / papers["vLLM"],
                by["Mooncake"].prefill_s / by["vLLM"].prefill_s,
            )
        )
    return tuple(rows)


def _checks(found: dict[System, ClusterRun]) -> tuple[Check, ...]:
    papers = PAPER["conversation"]
    close = all(abs(found[name].prefill_s / papers[name] - 1) <= TOLERANCE for name in SYSTEMS[:2])
    means = [found[name].prefill_s for name in sorted(SYSTEMS, key=lambda name: papers[name])]
    return (
        Check("conversation: Mooncake and plain vLLM within 10 %", close),
        Check(
            "conversation: Mooncake < prefix caching < plain < chunked prefill",
            means == sorted(means),
        ),
    )


def _panel(workload: MooncakeWorkload, by: dict[System, ClusterRun]) -> Panel:
    return Panel(
        workload.title,
        "system, 16 nodes",
        "mean prefill GPU time (s)",
        (
            bars("Fig. 8", "paper", {name: PAPER[workload.name][name] for name in by}),
            bars("simulated", "ours", {name: served.prefill_s for name, served in by.items()}),
        ),
    )

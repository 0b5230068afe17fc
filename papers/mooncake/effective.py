"""FAST'25 Figs 1, 6 and 7: the share of requests within a TBT limit, Mooncake against vLLM on as
many nodes."""

from __future__ import annotations

from moonpool.sim.defaults import DEFAULTS
from papers.constants import MOONCAKE_BUSY_SPEED, MOONCAKE_NODES
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import SYSTEMS, VLLM_INPUTS, ClusterRun, System, serve, system
from papers.mooncake.workload import TITLES, MooncakeWorkload, find_workload, read_workload
from papers.options import Options
from papers.plot import Panel, bars

LIMITS_S = (0.1, 0.2, 0.3)
PAPER: dict[str, dict[System, tuple[float, float, float]]] = {  # %, at LIMITS_S
    "conversation": {
        "Mooncake": (96.6, 100.0, 100.0),
        "vLLM": (16.1, 38.8, 62.7),
        "vLLM prefix caching": (15.0, 34.3, 55.5),
        "vLLM chunked prefill": (9.4, 28.8, 55.2),
    },
    "toolagent": {
        "Mooncake": (93.1, 99.7, 100.0),
        "vLLM": (43.1, 44.8, 49.8),
        "vLLM prefix caching": (56.5, 70.0, 81.2),
        "vLLM chunked prefill": (18.4, 21.3, 40.1),
    },
    "synthetic": {
        "Mooncake": (99.6, 100.0, 100.0),
        "vLLM": (61.3, 70.9, 77.9),
        "vLLM prefix caching": (60.9, 70.8, 77.2),
        "vLLM chunked prefill": (46.5, 57.3, 69.5),
    },
}
Found = dict[str, dict[System, ClusterRun]]
BIG_CHUNK_TOKENS = 2048


def run(options: Options) -> Finding:
    workloads = [
        read_workload(options, "conversation"),
        *(find_workload(options, name) for name in ("toolagent", "synthetic")),
    ]
    found: Found = {}
    for workload in workloads:
        found[workload.name] = {}
        for name in SYSTEMS:
            options.progress(f"{workload.title}, {name}")
            overrides = system(name, MOONCAKE_NODES)
            found[workload.name][name] = serve(workload, overrides, options.seed)
    variants = _variants(options, workloads[0])
    return Finding(
        name="mooncake-effective",
        title="Requests within a limit on the time between tokens",
        source="Mooncake, FAST'25 Figs 1, 6 and 7",
        paper_inputs=(
            "16 nodes each; vLLM v0.5.1 plain, with prefix caching, with chunked prefill",
            "a request's TBT is the mean of the longest tenth of its gaps; TTFT at most 30 s",
        ),
        chosen_inputs=(
            *(workload.origin for workload in workloads),
            "Mooncake: 8 prefill and 8 decode nodes, none turned away; each trace's own speed",
            *VLLM_INPUTS,
        ),
        rows=(
            *_rows(found, {workload.name for workload in workloads if workload.is_original}),
            *_variant_rows(variants),
        ),
        checks=_checks(found),
        notes=NOTES,
        panels=tuple(
            _panel(workload, found[workload.name], number)
            for workload in workloads
            for number in range(len(LIMITS_S))
        ),
    )


NOTES = (
    (
        "The share within a limit falls with the load for vLLM and hardly at all for Mooncake, and "
        "the paper prints no rate; so what it gains (+498 %, +64 %, +62 % at 100 ms) is a matter "
        "of the load that it was measured at, and only the order can be compared. Replayed "
        f"{MOONCAKE_BUSY_SPEED:g} x as fast, our vLLM is within the limits as often as the paper's."
    ),
    (
        "Chunked prefill with vLLM's own 512 tokens a step cannot be as bad as the paper's: by its "
        "Fig. 14 a chunk of 512 tokens takes 56 ms, and a step with decodes 65 ms, at any load. "
        f"It takes larger steps and more load to come near: {BIG_CHUNK_TOKENS:,} tokens a step at "
        f"{MOONCAKE_BUSY_SPEED:g} x speed. What the paper set is not printed."
    ),
)


def _variants(
    options: Options, conversation: MooncakeWorkload
) -> dict[str, tuple[System, ClusterRun]]:
    """Returns further runs of the conversation trace, by the name of their difference from the main
    runs: the system to compare with, and the run."""
    found: dict[str, tuple[System, ClusterRun]] = {}
    for name, chunk_tokens in ((SYSTEMS[0], 0), (SYSTEMS[1], 0), (SYSTEMS[3], BIG_CHUNK_TOKENS)):
        label = f"{name} at {MOONCAKE_BUSY_SPEED:g} x speed"
        overrides = system(name, MOONCAKE_NODES)
        if chunk_tokens:
            label += f", {chunk_tokens:,} tokens a step"
            overrides["engine"]["chunk_tokens"] = chunk_tokens
        options.progress(label)
        served = serve(conversation, overrides, options.seed, MOONCAKE_BUSY_SPEED)
        found[label] = (name, served)
    return found


def _variant_rows(variants: dict[str, tuple[System, ClusterRun]]) -> list[FindingRow]:
    return [
        FindingRow(
            f"conversation, {label}: TBT <= {1000 * limit_s:g} ms",
            "%",
            PAPER["conversation"][name][number],
            100 * served.share_within(limit_s),
            f"TTFT {served.ttft_s:.2f} s" if not number else "",
        )
        for label, (name, served) in variants.items()
        for number, limit_s in enumerate(LIMITS_S)
    ]


def _rows(found: Found, original: set[str]) -> tuple[FindingRow, ...]:
    rows = []
    for workload, by in found.items():
        title = TITLES[workload] + ("" if workload in original else "-like")
        for name, served in by.items():
            for number, limit_s in enumerate(LIMITS_S):
                ours = 100 * served.share_within(limit_s)
                note = ""
                if not number:
                    late = 1 - served.simulation.collector.ttft_s.share_up_to(TTFT_SLO_S)
                    note = f"TTFT {served.ttft_s:.2f} s, above {TTFT_SLO_S:g} s: {100 * late:.1f} %"
                label = f"{title}, {name}: TBT <= {1000 * limit_s:g} ms"
                rows.append(FindingRow(label, "%", PAPER[workload][name][number], ours, note))
    return tuple(rows)


TTFT_SLO_S: float = DEFAULTS["slo"]["ttft_s"]


def _checks(found: Found) -> tuple[Check, ...]:
    def beats(others: tuple[System, ...]) -> bool:
        return all(
            by["Mooncake"].share_within(limit_s) > by[name].share_within(limit_s)
            for by in found.values()
            for limit_s in LIMITS_S
            for name in others
        )

    return (
        Check(
            "Mooncake is within each limit more often than vLLM, plain or with prefix caching",
            beats(SYSTEMS[1:3]),
        ),
        Check("also more often than with chunked prefill", beats(SYSTEMS[3:])),
        Check(
            "Mooncake keeps 100 ms for nine requests in ten, on all three",
            all(by["Mooncake"].share_within(0.1) >= 0.9 for by in found.values()),
        ),
    )


def _panel(workload: MooncakeWorkload, by: dict[System, ClusterRun], number: int) -> Panel:
    limit_s = LIMITS_S[number]
    papers: dict[str, float] = {name: PAPER[workload.name][name][number] for name in by}
    ours: dict[str, float] = {name: 100 * s.share_within(limit_s) for name, s in by.items()}
    return Panel(
        f"{workload.title}: TBT <= {1000 * limit_s:g} ms",
        "system, 16 nodes",
        "requests (%)",
        (bars("Figs 1, 6, 7", "paper", papers), bars("simulated", "ours", ours)),
    )

"""The network that attention offloading needs (Lamina Fig. 4), and what sending queries first saves
(Fig. 14)."""

from __future__ import annotations

from moonpool.sim.hardware.offload_cost import (
    AttentionPool,
    OffloadCost,
    OffloadNetwork,
    least_bandwidth_bytes_per_s,
)
from papers.constants import device_of, roofline
from papers.finding import Check, Finding, FindingRow
from papers.lamina.runs import COMPUTE, MEMORY
from papers.options import Options
from papers.plot import Panel, PlotSeries

BATCHES = (20, 50, 100, 200, 300)
CONTEXTS = (1_024, 4_096, 8_192)
PAPER_MOST_BYTES_PER_S = 30e9
NIC_BYTES_PER_S = 50e9
ROUND_TRIP_S = 33e-6
"""Round trip of Lamina's own network stack (its Fig. 13); NCCL takes twice as long."""
OVERLAP_CONTEXT = 4_096
OVERLAP_BATCHES = {"llama-65b": (10, 20, 30, 40, 60), "llama3-70b": (25, 50, 100, 200, 300)}
PAPER_OVERLAP = {"llama-65b": 0.132, "llama3-70b": 0.035}


def run(options: Options) -> Finding:
    del options
    single = {c: [_least(1, 1, b, c) for b in BATCHES] for c in CONTEXTS}
    parallel = {c: [_least(2, 4, b, c) / 2 for b in BATCHES] for c in CONTEXTS}
    overlap = {name: _overlap(name) for name in OVERLAP_BATCHES}
    most = max(single[c][-1] for c in CONTEXTS[1:])
    rows = [
        FindingRow(
            "most that one H100 with one H20 needs, contexts of 4k and 8k, up to 300 requests",
            "GB/s",
            PAPER_MOST_BYTES_PER_S / 1e9,
            most / 1e9,
        ),
    ]
    for context in CONTEXTS:
        rows.append(
            FindingRow(f"one pair, {context} tokens, 300", "GB/s", None, single[context][-1] / 1e9)
        )
        label = f"(2,4), each H100's NIC, {context} tokens, 300"
        rows.append(FindingRow(label, "GB/s", None, parallel[context][-1] / 1e9))
    for name, saved in overlap.items():
        label = f"{name}: most that queries first save of TBT, {OVERLAP_CONTEXT} tokens"
        rows.append(FindingRow(label, "", PAPER_OVERLAP[name], max(saved)))
    return Finding(
        name="lamina-bandwidth",
        title="The network that attention offloading needs",
        source="Lamina, arXiv 2405.01814v2, section 3.1, Figs 4 and 14",
        paper_inputs=(
            "LLaMA3-70B; the wire may lengthen a step by a fifth; H100 and H20 with 400 Gbit/s",
            "its network's round trip of 33 us; queries first: 65B and LLaMA3-70B, 4k tokens",
        ),
        chosen_inputs=(
            "times of model and attention: the catalogue's rooflines (the paper measured them)",
        ),
        rows=tuple(rows),
        checks=(
            Check(
                "one NIC of 400 Gbit/s is enough for a pair at 4k tokens and more",
                most <= NIC_BYTES_PER_S,
            ),
            Check(
                "and at 1k tokens and with parallel devices, which the paper does not show",
                all(value <= NIC_BYTES_PER_S for values in parallel.values() for value in values),
            ),
            Check(
                "queries first save more with a KV head per head (65B) than with one for 8",
                max(overlap["llama-65b"]) > max(overlap["llama3-70b"]),
            ),
        ),
        notes=NOTES,
        panels=(_needed(single, parallel), _saved(overlap)),
    )


NOTES = (
    (
        "The paper reads 'never above 30 GB/s' off its Fig. 4 for single devices and no context in "
        "particular. Parallel devices take less time for the same bytes, and short contexts leave "
        "less attention to hide behind: both need more. With devices at their peaks the same "
        "equation gives 66 GB/s for a pair at 1024 tokens; at the rates they reach, less."
    ),
    (
        "What queries first save is bounded by the time that keys and values travel: 2/G of the "
        "bytes of queries and outputs, for G heads on a KV head."
    ),
)


def _least(num_model: int, num_attention: int, batch: int, context: int) -> float:
    model = roofline(COMPUTE, "llama3-70b", num_model)
    pool = AttentionPool(device_of(MEMORY), num_attention)
    return least_bandwidth_bytes_per_s(model, pool, batch, context)


def _overlap(shape: str) -> list[float]:
    """Returns the share of a step's time that is saved, by batch size, with one batch at a time."""
    model = roofline(COMPUTE, shape, 2)
    pool = AttentionPool(device_of(MEMORY), 4)
    rate = OffloadNetwork.of(device_of(COMPUTE), 2, pool).bytes_per_s
    wire = OffloadNetwork(rate, ROUND_TRIP_S)
    saved = []
    for batch in OVERLAP_BATCHES[shape]:
        context = batch * OVERLAP_CONTEXT
        late, early = (OffloadCost(model, pool, wire, 1, first) for first in (False, True))
        saved.append(1 - early.step_s((), batch, context) / late.step_s((), batch, context))
    return saved


def _needed(single: dict[int, list[float]], parallel: dict[int, list[float]]) -> Panel:
    at = tuple(float(batch) for batch in BATCHES)
    series = [
        PlotSeries(
            f"{name}, {context} tokens", "ours", "line", at, tuple(v / 1e9 for v in values[context])
        )
        for name, values in (("one pair", single), ("(2,4), each NIC", parallel))
        for context in CONTEXTS
    ]
    limit = PlotSeries("the paper's most", "paper", "line", at, (30.0,) * len(at))
    return Panel("Least bandwidth", "requests", "GB/s", (limit, *series))


def _saved(overlap: dict[str, list[float]]) -> Panel:
    series = tuple(
        PlotSeries(
            name, "ours", "line", tuple(float(b) for b in OVERLAP_BATCHES[name]), tuple(values)
        )
        for name, values in overlap.items()
    )
    return Panel("Time between tokens saved by queries first", "requests", "share", series)

"""Above which bandwidth fetching a cached prefix is faster than computing it (FAST'25 Eq. 1, 2)."""

from __future__ import annotations

from moonpool.cost.model import prompt_s
from moonpool.sim.hardware.calibrated import CALIBRATED, NUM_DEVICES, SHAPE
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.model_shapes import ModelShape
from papers.constants import device_of, roofline, shape_of
from papers.finding import Check, Finding, FindingRow
from papers.options import Options
from papers.plot import Panel, PlotSeries

ATTENTION, LINEAR = 4.0, 22.0  # a and b of Eq. 1
CAUSAL_ATTENTION = 2.0
PREFIX_TOKENS = 8192
PRINTED_BYTES_PER_S = {"A800-SXM": 6e9, "H800": 19e9}
PREFIXES = tuple(1024 << i for i in range(8))


def run(options: Options) -> Finding:
    del options
    shape = shape_of(SHAPE)
    return Finding(
        name="mooncake-reuse",
        title="When reusing a prefix is worth its transfer",
        source="Mooncake, FAST'25 section 2.2, Eq. 1 and 2",
        paper_inputs=(
            "LLaMA3-70B: hidden size 8192, 8 query heads per KV head, 2 bytes a number",
            "nodes of 8 A800 (312 TFLOP/s) or 8 H800 (989), at their peak; a prefix of 8192 tokens",
            "operations of n tokens: layers x (4 n^2 d + 22 n d^2)",
        ),
        chosen_inputs=(
            "as measured: the prefill times of Fig. 14, which are 42 % of peak at 8192 tokens",
            "for H800, which the paper did not measure: the catalogue's roofline",
        ),
        rows=_rows(shape),
        checks=_checks(shape),
        notes=NOTES,
        panels=(_panel(shape),),
    )


NOTES = (
    (
        "Eq. 1 counts attention over all pairs (a = 4); a causal prompt computes half of them. "
        "Counted once, the least bandwidth at 8192 tokens is a twelfth higher."
    ),
    (
        "Eq. 2 sets the peak of the accelerators against the bandwidth; at the rate they reach, "
        "computing takes over twice as long, so a network of less than half the printed "
        "bandwidth is enough. The paper's own Fig. 13, where computing anew wins below about 38 "
        "Gb/s (4.8 GB/s), lies between the two."
    ),
    (
        "By Eq. 2 longer prefixes need less: attention grows with the square of the length, "
        "KVCache does not. Measured, short prefixes need less too: of a prompt 0.09 s are fixed."
    ),
)


def least_bytes_per_s(
    shape: ModelShape, flops_per_s: float, prefix_tokens: int, attention: float = ATTENTION
) -> float:
    """Eq. 2, solved for the bandwidth."""
    hidden = float(shape.hidden)
    group = shape.heads / shape.kv_heads
    pairs = attention * prefix_tokens * hidden + LINEAR * hidden * hidden
    return 2 * hidden * shape.bytes_per_kv * flops_per_s / (group * pairs)


def peak_flops_per_s(device: Device) -> float:
    return NUM_DEVICES * device.peak_flops_per_s


def measured_bytes_per_s(shape: ModelShape, prefix_tokens: int) -> float:
    """The prefix's bytes over the time that a node of 8 A800 took to compute them."""
    return prefix_tokens * shape.kv_bytes_per_token / CALIBRATED.prefill_s(prefix_tokens, 0)


def _rows(shape: ModelShape) -> tuple[FindingRow, ...]:
    rows = []
    for name, printed in PRINTED_BYTES_PER_S.items():
        peak = peak_flops_per_s(device_of(name))
        eq = least_bytes_per_s(shape, peak, PREFIX_TOKENS)
        causal = least_bytes_per_s(shape, peak, PREFIX_TOKENS, CAUSAL_ATTENTION)
        rows += [
            FindingRow(
                f"8 x {name}: Eq. 2", "GB/s", printed / 1e9, eq / 1e9, "the paper rounds up"
            ),
            FindingRow(f"8 x {name}: with causal attention", "GB/s", None, causal / 1e9),
        ]
    measured = measured_bytes_per_s(shape, PREFIX_TOKENS)
    rows.append(FindingRow("8 x A800-SXM: by the prefill of Fig. 14", "GB/s", None, measured / 1e9))
    h800 = roofline("H800", SHAPE, NUM_DEVICES)
    modelled = PREFIX_TOKENS * shape.kv_bytes_per_token / prompt_s(h800, PREFIX_TOKENS, 0, 2048)
    rows.append(FindingRow("8 x H800: by the roofline's prefill", "GB/s", None, modelled / 1e9))
    return tuple(rows)


def _checks(shape: ModelShape) -> tuple[Check, ...]:
    return (
        Check(
            "the cluster's network (87 GB/s) is above all of these, at 1024 tokens and more",
            CALIBRATED.network_bytes_per_s
            > least_bytes_per_s(shape, peak_flops_per_s(device_of("H800")), PREFIXES[0]),
        ),
        Check(
            "at the rate that was measured, less bandwidth is enough than by Eq. 2",
            all(
                measured_bytes_per_s(shape, prefix)
                < least_bytes_per_s(shape, peak_flops_per_s(device_of("A800-SXM")), prefix)
                for prefix in PREFIXES
            ),
        ),
    )


def _panel(shape: ModelShape) -> Panel:
    at = tuple(float(prefix) for prefix in PREFIXES)
    peaks = {name: peak_flops_per_s(device_of(name)) for name in PRINTED_BYTES_PER_S}
    point = (float(PREFIX_TOKENS),)
    series = [
        PlotSeries(f"printed, 8 x {name}", "paper", "points", point, (printed / 1e9,))
        for name, printed in PRINTED_BYTES_PER_S.items()
    ]
    for name, peak in peaks.items():
        values = tuple(least_bytes_per_s(shape, peak, prefix) / 1e9 for prefix in PREFIXES)
        series.append(PlotSeries(f"Eq. 2, 8 x {name}", "ours", "line", at, values))
    values = tuple(
        least_bytes_per_s(shape, peaks["A800-SXM"], prefix, CAUSAL_ATTENTION) / 1e9
        for prefix in PREFIXES
    )
    series.append(PlotSeries("causal, 8 x A800-SXM", "ours", "line", at, values))
    values = tuple(measured_bytes_per_s(shape, prefix) / 1e9 for prefix in PREFIXES)
    series.append(PlotSeries("as measured, 8 x A800-SXM", "ours", "line", at, values))
    return Panel(
        "Least bandwidth for which reuse pays",
        "prefix (tokens)",
        "bandwidth (GB/s)",
        tuple(series),
        log_x=True,
    )

"""Lamina's throughput and batch sizes against a baseline of about the same price (Fig. 10, Tables 4
and 5), per dollar, and against devices of the cheap kind alone, which the paper leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.config.tables import ConfigError
from papers.finding import Check, Finding, FindingRow
from papers.lamina.runs import (
    CASES,
    TABLE_4,
    TRACES,
    USD_PER_H,
    Case,
    ThroughputResult,
    fitting,
    read_lengths,
    run_plant,
)
from papers.options import ExperimentError, MissingTraceError, Options
from papers.plot import Panel, bars

GAIN_RANGE = (0.161, 0.901)
BATCH_RATIO = 2.39
USD = {"33B": (20.32, 22.12), "65B": (40.64, 44.24), "LLaMA3-70B": (40.64, 44.24)}


@dataclass(frozen=True, slots=True)
class ThroughputCell:
    """A `ThroughputCell` is one model under one trace."""

    case: Case
    trace: str
    lamina: ThroughputResult
    rival: ThroughputResult
    all_memory: ThroughputResult

    @property
    def name(self) -> str:
        return f"{self.case.model}, {self.trace}"

    @property
    def gain(self) -> float:
        return self.lamina.tokens_per_s / self.rival.tokens_per_s - 1

    @property
    def batch_ratio(self) -> float:
        return self.lamina.batch / self.rival.batch

    @property
    def of_all_memory(self) -> float:
        """Returns Lamina's tokens per dollar divided by those of the cheap devices alone."""
        lamina = self.lamina.tokens_per_usd(self.case.lamina)
        return lamina / self.all_memory.tokens_per_usd(self.case.all_memory)


def run(options: Options) -> Finding:
    cells, origins, missing = _cells(options)
    gains = [cell.gain for cell in cells]
    ratios = [cell.batch_ratio for cell in cells]
    mean_ratio = sum(ratios) / len(ratios)
    rows = [
        FindingRow("least gain in throughput", "", GAIN_RANGE[0], min(gains)),
        FindingRow("largest gain in throughput", "", GAIN_RANGE[1], max(gains)),
        FindingRow("batch size over the baseline's, mean", "x", BATCH_RATIO, mean_ratio),
    ]
    for case in CASES:
        paper = USD[case.model]
        rows.append(
            FindingRow(f"{case.model}: Lamina's price", "$/h", paper[0], case.lamina.usd_per_h)
        )
        rows.append(
            FindingRow(f"{case.model}: the baseline's", "$/h", paper[1], case.rival.usd_per_h)
        )
    for cell in cells:
        rows += _rows(cell)
    return Finding(
        name="lamina-throughput",
        title="Attention offloading against devices of one kind at the same price",
        source="Lamina, arXiv 2405.01814v2, Fig. 10, Tables 4 and 5",
        paper_inputs=(
            "models, configurations and prices: LLaMA-33B on 1 H100 + 2 H20, LLaMA-65B and "
            "LLaMA3-70B on 2 H100 + 4 H20, against 2 and 4 H100; "
            + ", ".join(f"{name} at ${usd}/h" for name, usd in USD_PER_H.items()),
            "prefill left out on both sides, two staggered batches, 400 Gbit/s a device",
        ),
        chosen_inputs=(
            *origins,
            "all requests wait at the start; tokens per second while the middle half of them ends",
            "the catalogue's rooflines of H100 and H20; 90 % of the memory is usable",
        ),
        rows=tuple(rows),
        checks=_checks(cells),
        notes=(*NOTES, *missing),
        panels=(_gains(cells), _per_usd(cells)),
    )


NOTES = (
    (
        "The paper prints a range over its twelve cells and plots without numbers: the gain of a "
        "single cell is ours alone. Where the baseline gives more, two H100s are bound by "
        "arithmetic: a large batch of short contexts takes them twice as long as four."
    ),
    (
        "Batch sizes follow from memory: KVCache fits 2 to 2.5 times as often into the memory of "
        "H20s without weights as into what weights leave of H100s. The throughput gained is less, "
        "because a larger batch takes longer per step."
    ),
    (
        "The paper compares with H100s alone. With its own prices, H20s alone (tensor parallel, no "
        "more expensive than Lamina) are the baseline that it leaves out: tokens per dollar over "
        "theirs is below 1 where offloading does not pay."
    ),
)


def _cells(options: Options) -> tuple[list[ThroughputCell], list[str], list[str]]:
    """Returns the cells, and lines that say where the traces come from and which are missing.
    Raises MissingTraceError if all are."""
    cells: list[ThroughputCell] = []
    origins: list[str] = []
    missing: list[str] = []
    for trace in TRACES:
        try:
            lengths, origin = read_lengths(options, trace)
        except MissingTraceError as error:
            missing.append(f"{trace} is left out: {error}")
            continue
        number, prompt, output = TABLE_4[trace]
        origins.append(f"{origin} (Table 4: {number:,}; {prompt:,.0f} and {output:,.0f} tokens)")
        for case in CASES:
            options.progress(f"{case.model} under {trace}")
            cells.append(_cell(case, trace, lengths))
    missing.append("Azure-Code is left out: its lengths are in no trace that is at hand.")
    if not cells:
        raise MissingTraceError(missing[0])
    return cells, origins, missing


def _cell(case: Case, trace: str, lengths: list[tuple[int, int]]) -> ThroughputCell:
    try:
        served = fitting(lengths, case)
        given = [
            run_plant(plant, case.shape, served)
            for plant in (case.lamina, case.rival, case.all_memory)
        ]
    except ConfigError as error:
        raise ExperimentError(str(error)) from None
    return ThroughputCell(case, trace, *given)


def _rows(cell: ThroughputCell) -> list[FindingRow]:
    lamina, rival = cell.lamina, cell.rival
    return [
        FindingRow(f"{cell.name}: gain", "", None, cell.gain),
        FindingRow(f"{cell.name}: batch", "requests", None, lamina.batch),
        FindingRow(f"{cell.name}: the baseline's batch", "requests", None, rival.batch),
        FindingRow(f"{cell.name}: TBT", "s", None, lamina.tbt_s),
        FindingRow(f"{cell.name}: the baseline's TBT", "s", None, rival.tbt_s),
        FindingRow(
            f"{cell.name}: tokens per dollar over {cell.case.all_memory.name} alone",
            "x",
            None,
            cell.of_all_memory,
        ),
    ]


def _checks(cells: list[ThroughputCell]) -> tuple[Check, ...]:
    return (
        Check("Lamina gives more tokens than H100s in every cell", all(c.gain > 0 for c in cells)),
        Check("its batches are larger in every cell", all(c.batch_ratio > 1 for c in cells)),
        Check(
            "its time between tokens is longer in every cell, as the paper says",
            all(c.lamina.tbt_s > c.rival.tbt_s for c in cells),
        ),
        Check(
            "it gives more per dollar than H20s alone in every cell (not claimed by the paper)",
            all(c.of_all_memory > 1 for c in cells),
        ),
    )


def _gains(cells: list[ThroughputCell]) -> Panel:
    return Panel(
        "Throughput over H100s of about the same price",
        "",
        "gain",
        (bars("Lamina", "ours", {cell.name: cell.gain for cell in cells}),),
    )


def _per_usd(cells: list[ThroughputCell]) -> Panel:
    of = {
        "Lamina": {c.name: c.lamina.tokens_per_usd(c.case.lamina) / 1e6 for c in cells},
        "H100 alone": {c.name: c.rival.tokens_per_usd(c.case.rival) / 1e6 for c in cells},
        "H20 alone": {c.name: c.all_memory.tokens_per_usd(c.case.all_memory) / 1e6 for c in cells},
    }
    return Panel(
        "Tokens per dollar",
        "",
        "million tokens / $",
        tuple(bars(name, "ours", values) for name, values in of.items()),
    )

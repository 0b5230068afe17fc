"""FAST'25 Fig. 14: where the time of a single request goes, by its length and what is cached."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.request_record import RequestRecord
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.metrics import Collector
from moonpool.sim.simulation import Simulation
from moonpool.trace.row import TraceRow
from moonpool.types import InstanceId
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import cluster, serve
from papers.mooncake.workload import MooncakeWorkload
from papers.options import Options
from papers.plot import Panel, PlotSeries

LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
QUICK_LENGTHS = LENGTHS[:2]
HIT_SHARE = 0.95
DECODED_TOKENS = 128
ALONE_S = 300.0  # between two requests: the first is over long before
BLOCK_TOKENS: int = DEFAULTS["pool"]["block_tokens"]


class Phases(NamedTuple):
    """Phases of one request, in seconds."""

    prefill: float
    transfer: float
    load: float
    decode: float


PAPER = {
    8_192: Phases(1.00, 0.030, 0.028, 3.40),
    16_384: Phases(2.06, 0.060, 0.055, 3.43),
    32_768: Phases(4.48, 0.125, 0.108, 3.52),
    65_536: Phases(10.59, 0.249, 0.213, 3.66),
    131_072: Phases(27.51, 0.494, 0.421, 3.94),
}
PAPER_HIT_PREFILL_S = {8_192: 0.135, 16_384: 0.226, 32_768: 0.407, 65_536: 0.881, 131_072: 2.33}
NAMES = {8_192: "8k", 16_384: "16k", 32_768: "32k", 65_536: "64k", 131_072: "128k"}


def run(options: Options) -> Finding:
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    cold = {n: phases_of(n, 0.0, layer_wise=False, seed=options.seed) for n in lengths}
    warm = {n: phases_of(n, HIT_SHARE, layer_wise=False, seed=options.seed) for n in lengths}
    return Finding(
        name="mooncake-latency",
        title="One request, phase by phase",
        source="Mooncake, FAST'25 Fig. 14",
        paper_inputs=(
            "lengths, 0 % and 95 % of the prompt cached, 128 tokens decoded; nothing else runs",
        ),
        chosen_inputs=(
            "one prefill and one decode node; the KVCache leaves when the prompt is done, as drawn",
            f"what is cached are whole blocks of {BLOCK_TOKENS} tokens, at the prefill node",
        ),
        rows=_rows(cold, warm),
        checks=_checks(cold, warm),
        notes=NOTES,
        panels=(_phases_panel(cold), _prefill_panel(cold, warm)),
    )


NOTES = (
    (
        "The simulator's default cost is fitted to this very figure (prefill, links, decode of one "
        "request): this checks that a request run through all of it comes out as it went in, not "
        "that the figure follows from first principles."
    ),
    (
        "Scheduling takes about 0.05 s in the paper. A decision of ours costs well below a "
        "millisecond (`moonpool bench conductor`), and messages 0.5 ms of simulated time."
    ),
)


class _Keeping(Collector):
    """A collector that also keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[RequestRecord] = []

    def note_ended(self, record: RequestRecord, slo_class: str = "") -> None:
        self.records.append(record)
        super().note_ended(record, slo_class)


def phases_of(num_tokens: int, hit_share: float, *, layer_wise: bool, seed: int) -> Phases:
    """Returns the phases of a request that is alone in the cluster. An earlier request has
    prefilled the part that is cached."""
    num_blocks = num_tokens // BLOCK_TOKENS
    num_cached = int(num_blocks * hit_share)
    names = tuple(range(num_blocks))
    rows = [TraceRow(ALONE_S, num_tokens, DECODED_TOKENS + 1, names)]
    if num_cached:
        # Its answer is one token, so none of its KVCache enters the decode node's cache.
        rows.insert(0, TraceRow(0.0, num_cached * BLOCK_TOKENS, 1, names[:num_cached]))
    workload = MooncakeWorkload("single", rows, BLOCK_TOKENS, False, "")
    keeping = _Keeping()

    def watch(simulation: Simulation) -> None:
        simulation.collector = keeping

    overrides = cluster(1, 1)
    if not layer_wise:  # nothing leaves before the whole prompt is computed
        overrides["engine"] = {"chunk_tokens": LENGTHS[-1]}
    served = serve(workload, overrides, seed, layer_wise=layer_wise, watch=watch)
    record = keeping.records[-1]
    assert record.prefill_started_s is not None
    # The last stream began with its prefill. When the record says that the transfer is done, the
    # blocks are also loaded.
    sender = served.simulation.nodes[InstanceId("prefill-0")].messenger
    received_s = record.prefill_started_s + sender.figures.seconds
    return Phases(
        prefill=between(record.prefill_started_s, record.prefill_done_s),
        transfer=between(record.prefill_done_s, received_s),
        load=between(received_s, record.transfer_done_s),
        decode=between(record.transfer_done_s, record.finished_s),
    )


def between(begin_s: float | None, end_s: float | None) -> float:
    assert begin_s is not None and end_s is not None
    return end_s - begin_s


def _rows(cold: dict[int, Phases], warm: dict[int, Phases]) -> tuple[FindingRow, ...]:
    rows = []
    for n, found in cold.items():
        papers = PAPER[n]
        rows += [
            FindingRow(f"{NAMES[n]}: {name}", "s", getattr(papers, name), getattr(found, name))
            for name in Phases._fields
        ]
        paper = PAPER_HIT_PREFILL_S[n]
        rows.append(FindingRow(f"{NAMES[n]}: prefill, 95 % cached", "s", paper, warm[n].prefill))
    longest = max(cold)
    if longest == LENGTHS[-1]:
        rows.append(
            FindingRow(
                "128k: prefill saved by 95 % cached",
                "%",
                92.0,
                100 * (1 - warm[longest].prefill / cold[longest].prefill),
            )
        )
        rows.append(
            FindingRow(
                "128k: TTFT saved by 95 % cached", "%", 86.0, 100 * _ttft_saved(cold, warm, longest)
            )
        )
    return tuple(rows)


def _ttft_saved(cold: dict[int, Phases], warm: dict[int, Phases], n: int) -> float:
    later_s = cold[n].transfer + cold[n].load  # all of the KVCache travels in both cases
    return 1 - (warm[n].prefill + later_s) / (cold[n].prefill + later_s)


def _checks(cold: dict[int, Phases], warm: dict[int, Phases]) -> tuple[Check, ...]:
    return (
        Check(
            "95 % cached saves over four fifths of the prefill at every length",
            all(warm[n].prefill < 0.2 * cold[n].prefill for n in cold),
        ),
        Check(
            "decode grows by less than a third from the shortest to the longest",
            cold[max(cold)].decode < 4 / 3 * cold[min(cold)].decode,
        ),
    )


def _phases_panel(cold: dict[int, Phases]) -> Panel:
    at = tuple(float(n) for n in cold)
    series = [
        PlotSeries(name, "paper", "points", at, tuple(getattr(PAPER[n], name) for n in cold))
        for name in Phases._fields
    ]
    series += [
        PlotSeries(name, "ours", "line", at, tuple(getattr(found, name) for found in cold.values()))
        for name in Phases._fields
    ]
    return Panel(
        "Nothing cached", "prompt (tokens)", "time (s)", tuple(series), log_x=True, log_y=True
    )


def _prefill_panel(cold: dict[int, Phases], warm: dict[int, Phases]) -> Panel:
    at = tuple(float(n) for n in cold)
    return Panel(
        "Prefill",
        "prompt (tokens)",
        "time (s)",
        (
            PlotSeries("0 % cached", "paper", "points", at, tuple(PAPER[n].prefill for n in cold)),
            PlotSeries(
                "95 % cached", "paper", "points", at, tuple(PAPER_HIT_PREFILL_S[n] for n in cold)
            ),
            PlotSeries("0 % cached", "ours", "line", at, tuple(p.prefill for p in cold.values())),
            PlotSeries("95 % cached", "ours", "line", at, tuple(p.prefill for p in warm.values())),
        ),
        log_x=True,
        log_y=True,
    )

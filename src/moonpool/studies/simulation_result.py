"""Holds the result of a simulation: figures, tables of requests, instances and time, and a page."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moonpool.config.tables import Config
from moonpool.distributions import rounded
from moonpool.pages.units import duration
from moonpool.request_record import STAGES, RequestRecord
from moonpool.studies.result_table import ResultTable

if TYPE_CHECKING:
    from moonpool.sim.report.drawing import Drawing
    from moonpool.sim.simulation import Simulation


class SimulationResult:
    """The result of a simulation. `summary` has the figures of `moonpool simulate --json`, `config`
    is the whole configuration."""

    def __init__(
        self, simulation: Simulation, summary: dict[str, Any], requests: RequestLog
    ) -> None:
        self.summary = summary
        self._simulation = simulation
        self._requests = requests

    def __repr__(self) -> str:
        found = self.summary
        return (
            f"<SimulationResult of {found['run']['trace']}: {found['effective']:,} of"
            f" {found['requests']:,} requests within both SLOs, TTFT p90"
            f" {found['ttft_s']['p90']:.3g} s, hit ratio {found['cache']['hit_ratio']:.3f}>"
        )

    def _repr_html_(self) -> str:
        """Returns the main figures as HTML, for notebooks."""
        from moonpool.studies.notebook_html import pairs_html

        found = self.summary
        share = f"{found['effective']:,} of {found['requests']:,}, {found['effective_share']:.1%}"
        pairs = {
            "within both SLOs": f"{share} ({found['goodput_rps']:.3g} requests/s)",
            "refused, failed": f"{found['rejected']:,}, {found['failed']:,}",
            "TTFT, time to first token": _spread(found["ttft_s"]),
            "TBT, slow tenth of an answer": _spread(found["tbt_top10_mean_s"]),
            "prompt tokens from the cache": f"{found['cache']['hit_ratio']:.1%}",
        }
        for name, one in found.get("slo_classes", {}).items():
            pairs[f"class {name}"] = f"{one['effective']:,} of {one['requests']:,} within its SLOs"
        if found.get("usd") is not None:
            pairs["price"] = f"{found['usd']:,.2f} USD for the run"
        return pairs_html(f"Simulation of {found['run']['trace']}", pairs)

    def plot(self, what: str = "ttft") -> Drawing:
        """Draws a chart of the report: "ttft", "tbt" or "requests". Raises ValueError."""
        from moonpool.sim.report.user_figures import CHARTS
        from moonpool.studies.notebook_html import drawn

        if what not in CHARTS:
            raise ValueError(f"there is no plot {what!r}: use one of {', '.join(CHARTS)}")
        return drawn(CHARTS[what](self._simulation))

    @property
    def config(self) -> Config:
        return self._simulation.config

    @property
    def simulation(self) -> Simulation:
        """The whole simulation, whose attributes may change in any release."""
        return self._simulation

    @cached_property
    def requests(self) -> ResultTable:
        """A table with one row per request, in order of arrival."""
        return self._requests.table()

    @cached_property
    def timeline(self) -> ResultTable:
        """A table of load, queues and counts over the simulated time. Its first column, `time_s`,
        is that time."""
        timeline = self._simulation.timeline
        return ResultTable.from_rows(("time_s", *timeline.names), timeline.rows)

    @cached_property
    def instances(self) -> ResultTable:
        """A table with one row per instance: its role, its pool, and its share of busy time."""
        simulation = self._simulation
        span_s = max(simulation.clock.now, 1e-9)
        tokens = simulation.hardware.layout.block_tokens
        rows = [
            (
                *(str(name), node.info.role.value, node.instance.num_blocks * tokens),
                rounded(min(node.engine.figures.busy_s / span_s, 1.0)),
                node.engine.figures.prefill_tokens,
                node.engine.figures.decode_tokens,
            )
            for name, node in simulation.nodes.items()
        ]
        names = ("instance", "role", "pool_tokens", "busy_share", "prefill_tokens", "decode_tokens")
        return ResultTable.from_rows(names, rows)

    def save(self, path: str | Path) -> None:
        """Writes the figures as JSON, for `moonpool report` and `compare`. Raises OSError."""
        text = msgspec.json.format(msgspec.json.encode(self.summary), indent=2)
        Path(path).write_bytes(text + b"\n")

    def report(self, path: str | Path, command: str = "moonpool.simulate(...)") -> None:
        """Writes the page of `simulate --report`, which names `command`. Raises OSError."""
        Path(path).write_text(self.html(command), encoding="utf-8")

    def html(self, command: str = "moonpool.simulate(...)") -> str:
        """Returns the page of `simulate --report` as text."""
        from moonpool.sim.report.page import render_report

        return render_report(self._simulation, self.summary, command, self.summary["run"]["trace"])


def _spread(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {duration(values[name])}" for name in ("p50", "p90", "p99"))


COLUMNS = (
    *("request", "arrived_s", "outcome", "effective", "prompt_tokens", "output_tokens"),
    *("cached_tokens", "fetched_tokens", "loaded_tokens", "ttft_s", "predicted_ttft_s", "tpot_s"),
    *("tbt_top10_mean_s", "total_s", "prefill_instance", "decode_instance", "attempts"),
    *(f"{name}_s" for name, _, _ in STAGES),
)
"""The columns of the table of requests. `request` counts from 0 in order of arrival. All times are
in seconds. The last columns are the stages, which sum to `total_s`."""


class RequestLog:
    """Keeps the figures of each ended request."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def add(self, record: RequestRecord) -> None:
        stages = record.stages_s()
        finished_s = record.finished_s
        self._rows.append(
            (
                *(int(record.request_id), record.arrived_s, record.outcome, record.effective),
                *(record.num_prompt_tokens, record.num_generated_tokens, record.cached_tokens),
                *(record.fetched_tokens, record.loaded_tokens, record.ttft_s),
                *(record.expected_ttft_s, record.tpot_s, record.tbt_top10_mean_s),
                None if finished_s is None else finished_s - record.arrived_s,
                *(record.prefill_instance, record.decode_instance, record.attempts),
                *(stages.get(name) for name, _, _ in STAGES),
            )
        )

    def table(self) -> ResultTable:
        """Returns the table of all requests, in order of arrival."""
        return ResultTable.from_rows(COLUMNS, sorted(self._rows, key=lambda row: int(row[0])))

"""One row per request of a simulation, for the table `requests` of its result."""

from __future__ import annotations

from typing import Any

from moonpool.request_record import STAGES, RequestRecord
from moonpool.studies.result_table import ResultTable

COLUMNS = (
    *("request", "arrived_s", "outcome", "effective", "prompt_tokens", "output_tokens"),
    *("cached_tokens", "fetched_tokens", "loaded_tokens", "ttft_s", "predicted_ttft_s", "tpot_s"),
    *("tbt_top10_mean_s", "total_s", "prefill_instance", "decode_instance", "attempts"),
    *(f"{name}_s" for name, _, _ in STAGES),
)
"""`request` counts from 0 in order of arrival; all times are seconds. The last columns are the
stages, which sum to `total_s`."""


class RequestLog:
    """Keeps the figures of each request that has ended."""

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
        """All requests, in order of arrival."""
        return ResultTable.from_rows(COLUMNS, sorted(self._rows, key=lambda row: int(row[0])))

"""One log line for each ended request, with where its time went (`--log-requests`)."""

from __future__ import annotations

import logging
from typing import Any

from moonpool.request_record import RequestRecord

log = logging.getLogger("moonpool.requests")


class RequestLogger:
    """`RequestLogger` writes nothing unless it is enabled."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def request_ended(self, record: RequestRecord, now: float) -> None:
        if self._enabled:
            fields = request_fields(record)
            log.info("%s", _line(fields), extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """Returns the figures of a request by name; seconds are rounded to microseconds."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "outcome": record.outcome,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "fetched_tokens": record.fetched_tokens,
        "ssd_tokens": record.loaded_tokens,
        "generated_tokens": record.answer_tokens,
        "attempts": record.attempts,
        "prefill": record.prefill_instance,
        "decode": record.decode_instance,
        "ttft_s": record.ttft_s,
        "tbt_s": record.tbt_top10_mean_s,
        "stages_s": {name: round(spent_s, 6) for name, spent_s in record.stages_s().items()},
    }
    if record.tenant:
        fields["tenant"] = record.tenant
    if record.program:
        fields["program"] = record.program
    if record.parent_program:
        fields["parent_program"] = record.parent_program
    if record.slo.class_name:
        fields["slo_class"] = record.slo.class_name
    if record.finished_s is not None:
        fields["total_s"] = record.finished_s - record.arrived_s
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
    }


def _line(fields: dict[str, Any]) -> str:
    places = " -> ".join(dict.fromkeys(filter(None, (fields["prefill"], fields["decode"]))))
    stages = ", ".join(
        f"{name.replace('_', ' ')} {_ms(spent_s)}" for name, spent_s in fields["stages_s"].items()
    )
    return (
        f"request {fields['request_id']}: {fields['outcome']} after {_ms(fields.get('total_s'))}"
        f" on {places or 'no instance'}; {fields['prompt_tokens']} prompt tokens"
        f" ({fields['cached_tokens']} cached, {fields['fetched_tokens']} of them fetched,"
        f" {fields['ssd_tokens']} from SSD), {fields['generated_tokens']} generated;"
        f" TTFT {_ms(fields['ttft_s'])}, TBT {_ms(fields['tbt_s'])}; {stages or 'not placed'}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"

"""`moonpool status`: a running cluster in five lines, from one frame of its live page."""

from __future__ import annotations

from typing import Any

import click

from moonpool.cli.options import SERVER_URL, api_key_option, ca_file_option
from moonpool.cli.output import fail
from moonpool.cli.watch.cluster_events import NoFramesError, bearer_key, first_frame, time_text


@click.command()
@click.argument("url", type=SERVER_URL, default="http://127.0.0.1:8000")
@api_key_option
@ca_file_option
def status(url: str, api_key: str | None, ca_file: str) -> None:
    """Show the cluster at URL in five lines: instances, load, requests, latencies and hits."""
    try:
        frame = first_frame(url, bearer_key(api_key), ca_file)
    except NoFramesError as error:
        fail(str(error))
    for line in status_lines(frame):
        click.echo(line)


def status_lines(frame: dict[str, Any]) -> list[str]:
    """Returns the five lines of a frame, and one for each standby and each note on an instance."""
    totals, slo, tokens = frame["totals"], frame["slo"], frame["totals"]["tokens"]
    ttft = _latency(totals["ttft_s"], slo["ttft_s"])
    tbt = _latency(totals["tbt_s"], slo["tbt_s"])
    by_tier = (
        f"{tokens['dram']:,} from DRAM, {tokens['fetched']:,} fetched,"
        f" {tokens['ssd']:,} from SSD, {tokens['computed']:,} computed"
    )
    standbys = [
        f"standby    {standby['host']}:{standby['port']}, heard {standby['heard_s_ago']:.1f} s ago"
        for standby in frame.get("standbys", ())
    ]
    notes = [
        f"note       {instance['instance_id']}: {instance['note']}"
        for instance in frame["instances"]
        if instance.get("note")
    ]
    return [
        f"instances  {_roles(frame['instances'])}",
        f"load       {_load(frame)}",
        f"requests   {frame['under_way']} under way; last 10 min: {_ended(totals)}",
        f"latency    TTFT {ttft}; TBT {tbt}",
        f"prompts    {sum(tokens.values()):,} tokens: {by_tier}",
        *standbys,
        *notes,
    ]


def _roles(instances: list[dict[str, Any]]) -> str:
    roles = [instance["role"] for instance in instances]
    counts = [
        f"{roles.count(name)} {name}" for name in ("prefill", "decode", "mixed") if name in roles
    ]
    draining = sum(instance["draining"] is not None for instance in instances)
    if draining:
        counts.append(f"{draining} draining")
    return ", ".join(counts) or "none"


def _load(frame: dict[str, Any]) -> str:
    loaded = [instance for instance in frame["instances"] if "load" in instance]
    if not loaded:
        return "no instance" if frame["tenant"] is None else "shown to the operator's key only"
    most = max(loaded, key=lambda instance: instance["projected"])
    held = sum(instance["held"] for instance in loaded)
    blocks = sum(instance["blocks"] for instance in loaded)
    return (
        f"highest on {most['instance_id']}: {most['load']:.2f} now, {most['projected']:.2f} with"
        f" all booked; {held:,} of {blocks:,} blocks held"
    )


def _ended(totals: dict[str, Any]) -> str:
    parts = [f"{totals['answered']} answered", f"{totals['effective']} within both SLOs"]
    parts += [f"{number} {reason}" for reason, number in totals["not_answered"].items()]
    return ", ".join(parts)


def _latency(found: dict[str, float] | None, slo_s: float) -> str:
    if found is None:
        return f"- (SLO {time_text(slo_s)})"
    shown = ", ".join(f"{name} {time_text(value)}" for name, value in found.items())
    return f"{shown} (SLO {time_text(slo_s)})"

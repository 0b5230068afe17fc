"""`moonpool status`: a running cluster in five lines, from one frame of its live page."""

from __future__ import annotations

from typing import Any

import click

from moonpool.cli.output import one_line
from moonpool.cli.server.address import Server, asks_server
from moonpool.cli.watch.cluster_events import NoFramesError, first_frame, time_text


@click.command()
@asks_server()
def status(server: Server) -> None:
    """Show the cluster at URL in five lines: instances, load, requests, latencies and hits."""
    with one_line(NoFramesError):
        frame = first_frame(server)
    for line in status_lines(frame):
        click.echo(line)


def status_lines(frame: dict[str, Any]) -> list[str]:
    """Returns the five lines of a frame. If the cluster lacks something, one line
    before these says what. One line follows for each standby, each faulty SSD tier and each note
    on an instance."""
    totals, slo, tokens = frame["totals"], frame["slo"], frame["totals"]["tokens"]
    ttft = _latency(totals["ttft_s"], _slo(slo, "ttft_s"))
    tbt = _latency(totals["tbt_s"], _slo(slo, "tbt_s"))
    by_tier = (
        f"{tokens['dram']:,} from DRAM, {tokens['fetched']:,} fetched,"
        f" {tokens['ssd']:,} from SSD, {tokens['computed']:,} computed"
    )
    standbys = [
        f"standby    {standby['host']}:{standby['port']}, heard {standby['heard_s_ago']:.1f} s ago"
        for standby in frame.get("standbys", ())
    ]
    lack = [f"not ready  {frame['lack']}"] if frame.get("lack") else []
    notes = [
        f"note       {instance['instance_id']}: {instance['note']}"
        for instance in frame["instances"]
        if instance.get("note")
    ]
    return [
        *lack,
        f"instances  {_roles(frame['instances'])}",
        f"load       {_load(frame)}",
        f"requests   {frame['under_way']} under way; last 10 min: {_ended(totals)}",
        f"latency    TTFT {ttft}; TBT {tbt}",
        f"prompts    {sum(tokens.values()):,} tokens: {by_tier}",
        *standbys,
        *_disks(frame["instances"]),
        *notes,
    ]


def _disks(instances: list[dict[str, Any]]) -> list[str]:
    lines = []
    for instance in instances:
        tier, name = instance.get("ssd") or {}, instance["instance_id"]
        if tier.get("error"):
            lines.append(f"disk       {name} serves without it: {tier['error']}")
        if tier.get("damaged"):
            count = f"{tier['damaged']:,} damaged blocks were found"
            lines.append(f"disk       {name}: {count}; its log names the files")
    return lines


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


def _slo(slo: dict[str, Any], key: str) -> str:
    what = "assumed SLO" if key in slo.get("assumed", ()) else "SLO"
    return f"{what} {time_text(slo[key])}"


def _latency(found: dict[str, float] | None, slo: str) -> str:
    if found is None:
        return f"- ({slo})"
    shown = ", ".join(f"{name} {time_text(value)}" for name, value in found.items())
    return f"{shown} ({slo})"

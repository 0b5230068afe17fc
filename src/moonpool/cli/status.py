"""`moonpool status`: a running cluster in five lines, from one frame of its live page."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from moonpool.cli.options import api_key_option
from moonpool.cli.output import fail

_TIMEOUT_S = 30.0


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@api_key_option
def status(url: str, api_key: str | None) -> None:
    """Show the cluster at URL in five lines: instances, load, requests, latencies and hits."""
    for line in status_lines(_first_frame(url, api_key or os.environ.get("OPENAI_API_KEY"))):
        click.echo(line)


def status_lines(frame: dict[str, Any]) -> list[str]:
    """Returns the five lines of a frame."""
    totals, slo, tokens = frame["totals"], frame["slo"], frame["totals"]["tokens"]
    ttft = _latency(totals["ttft_s"], slo["ttft_s"])
    tbt = _latency(totals["tbt_s"], slo["tbt_s"])
    by_tier = (
        f"{tokens['dram']:,} from DRAM, {tokens['fetched']:,} fetched,"
        f" {tokens['ssd']:,} from SSD, {tokens['computed']:,} computed"
    )
    return [
        f"instances  {_roles(frame['instances'])}",
        f"load       {_load(frame)}",
        f"requests   {frame['under_way']} under way; last 10 min: {_ended(totals)}",
        f"latency    TTFT {ttft}; TBT {tbt}",
        f"prompts    {sum(tokens.values()):,} tokens: {by_tier}",
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
        return f"- (SLO {1e3 * slo_s:g} ms)"
    shown = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in found.items())
    return f"{shown} (SLO {1e3 * slo_s:g} ms)"


def _first_frame(url: str, key: str | None) -> dict[str, Any]:
    """Ends the command with one line on any error."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}/cluster/events"
    frame = None
    try:
        with httpx.stream("GET", address, headers=headers, timeout=_TIMEOUT_S) as events:
            if events.status_code in (401, 503):
                fail(str(json.loads(events.read())["error"]["message"]))
            events.raise_for_status()
            data = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
            frame = json.loads(next(data, "null"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}; start one or correct the URL")
    except (ValueError, KeyError, TypeError):
        pass
    if not isinstance(frame, dict) or "totals" not in frame:
        fail(f"{url} is no moonpool server, or it is stopping: correct the URL")
    return frame

"""`moonpool rewind`: replays the decisions of a server's Conductor."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from moonpool.cli.options import json_option
from moonpool.cli.output import fail, write_json
from moonpool.cli.server.address import Server, access_options, full_url, is_address
from moonpool.cli.server.client import ClusterClient

_MAX_LISTED = 10


@click.command()
@click.argument("source", metavar="URL|FILE")
@click.option("--save", metavar="FILE", help="Keep the fetched log. It holds prompts and answers.")
@click.option("--request", metavar="ID", help="Show why this request went where it went.")
@click.option(
    "--at", metavar="S", type=float, help="Show the cluster S seconds after the first event."
)
@click.option("--trace", metavar="FILE", help="Write the arrivals as a trace for `simulate`.")
@click.option("--trust-policies", is_flag=True, help="Import the policies that the log names.")
@access_options()
@json_option
def rewind(
    source: str,
    save: str | None,
    request: str | None,
    at: float | None,
    trace: str | None,
    trust_policies: bool,
    api_key: str,
    ca_file: str,
    json_file: str | None,
) -> None:
    """Replay the last events of a server's Conductor and compare each decision.

    The events come from a running server at URL, or from a FILE that --save wrote. The Conductor
    that `simulate` runs takes them again, and the command tells where it decides otherwise.
    """
    from moonpool.config.tables import ConfigError
    from moonpool.rewind.event_log import EventLogError, read_file
    from moonpool.rewind.replay import Replay

    data = _read(source, api_key, ca_file)
    try:
        file = read_file(data)
        if save:
            _write_private(save, data)
        _check_policies(file.config, trust_policies)
        replay = Replay(file)
        shown = at is None
        for now in replay.run():
            if not shown and now - (replay.first_s or now) >= (at or 0.0):
                _show_cluster(replay.conductor, now)
                shown = True
    except (EventLogError, ConfigError) as error:
        fail(f"{source}: {error}")
    if not shown:
        last_s = replay.now - (replay.first_s or 0.0)
        fail(f"--at {at:g} is after the last event, at {last_s:.1f} s; give an earlier time")
    if trace:
        _write_trace(trace, replay)
    if request:
        _show_request(replay, request)
    figures = _figures(replay, file.release)
    _print(figures)
    write_json(json_file, figures)
    if figures["differences"]:
        raise SystemExit(1)


def _check_policies(config: Any, trusted: bool) -> None:
    """Checks the policies: a log from elsewhere must not choose what is imported here."""
    from moonpool.config.tables import is_own_policy

    own = [name for name in (config.placement, config.admission) if is_own_policy(name)]
    if own and not trusted:
        fail(f"the log names the policy {own[0]}; if that is yours, add --trust-policies")


def _read(source: str, api_key: str, ca_file: str) -> bytes:
    from moonpool.rewind.event_log import MAX_FILE_BYTES

    if is_address(source):
        client = ClusterClient(Server(full_url(source), api_key, ca_file))
        return client.get_bytes("/cluster/event_log")
    try:
        with Path(source).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        fail(f"{source} cannot be read: {error.strerror}; give the URL of a server or a saved log")
    if len(data) > MAX_FILE_BYTES:
        fail(f"{source} has more than {MAX_FILE_BYTES:,} bytes and is no event log")
    return data


def _write_private(path: str, data: bytes) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")


def _write_trace(path: str, replay: Any) -> None:
    from moonpool.rewind.replay import trace_lines

    lengths = {name: record.answer_tokens for name, (record, _) in replay.ended.items()}
    try:
        Path(path).write_bytes(b"".join(trace_lines(replay.arrivals, lengths)))
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    click.echo(f"{path}: {len(replay.arrivals):,} requests; replay them with `moonpool simulate`")


def _show_request(replay: Any, request_id: str) -> None:
    from moonpool.head.explain import describe_record

    tracked = replay.conductor.requests.get(request_id)
    if request_id in replay.ended:
        record, lines = replay.ended[request_id]
    elif tracked is not None:
        record, lines = tracked.record, tracked.explanation.lines()
    else:
        known = ", ".join(list(replay.ended)[-_MAX_LISTED:]) or "none"
        fail(f"the log has no request {request_id}; the last ones that ended: {known}")
    click.echo(msgspec.json.format(msgspec.json.encode(describe_record(record, lines))).decode())


def _show_cluster(conductor: Any, now: float) -> None:
    from moonpool.head.explain import describe_cluster

    described = msgspec.json.encode(describe_cluster(conductor, now))
    click.echo(msgspec.json.format(described).decode())


def _figures(replay: Any, release: str) -> dict[str, Any]:
    first_s = replay.first_s or 0.0
    return {
        "release": release,
        "first": datetime.fromtimestamp(first_s + replay.file.wall_s, UTC).isoformat(),
        "seconds": replay.now - first_s,
        "events": replay.num_events,
        "requests": len(replay.arrivals),
        "decisions": replay.num_decisions,
        "differences": replay.num_differences,
        "first_differences": [msgspec.to_builtins(each) for each in replay.differences],
    }


def _print(figures: dict[str, Any]) -> None:
    click.echo(
        f"{figures['events']:,} events over {figures['seconds']:.1f} s from {figures['first']},"
        f" {figures['requests']:,} new requests, {figures['decisions']:,} decisions"
    )
    if not figures["differences"]:
        click.echo("the replay decides the same each time")
        return
    click.echo(f"the replay differs at {figures['differences']:,} events; the first ones:")
    for each in figures["first_differences"][:_MAX_LISTED]:
        click.echo(f"  event {each['number']} at {each['at_s']:.3f} s")
        click.echo(f"    logged    {'; '.join(each['logged']) or 'nothing'}")
        click.echo(f"    replayed  {'; '.join(each['replayed']) or 'nothing'}")

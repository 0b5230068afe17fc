"""`moonpool rewind`: replays what a server's Conductor decided."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from moonpool.cli.options import api_key_option, json_option
from moonpool.cli.output import fail, write_json
from moonpool.cli.watch.cluster_events import NO_KEY, bearer_key

_TIMEOUT_S = 120.0
_MAX_LISTED = 10
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}")


@click.command()
@click.argument("source", metavar="URL|FILE")
@click.option("--save", metavar="FILE", help="Keep the fetched log. It holds prompts and answers.")
@click.option("--request", metavar="ID", help="Show why this request went where it went.")
@click.option(
    "--at", metavar="S", type=float, help="Show the cluster S seconds after the first event."
)
@click.option("--trace", metavar="FILE", help="Write the arrivals as a trace for `simulate`.")
@click.option("--trust-policies", is_flag=True, help="Import the policies that the log names.")
@api_key_option
@json_option
def rewind(
    source: str,
    save: str | None,
    request: str | None,
    at: float | None,
    trace: str | None,
    trust_policies: bool,
    api_key: str | None,
    json_file: str | None,
) -> None:
    """Replay the last events of a server's Conductor and compare each decision.

    The events come from a running server at URL, or from a FILE that --save wrote. The Conductor
    that `simulate` runs takes them again, and the command tells where it decides otherwise.
    """
    from moonpool.config import ConfigError
    from moonpool.rewind.event_log import EventLogError, read_file
    from moonpool.rewind.replay import Replay

    data = _read(source, bearer_key(api_key))
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
    """A log from elsewhere must not choose what is imported here."""
    from moonpool.config import is_own_policy

    own = [name for name in (config.placement, config.admission) if is_own_policy(name)]
    if own and not trusted:
        fail(f"the log names the policy {own[0]}; if that is yours, add --trust-policies")


def _read(source: str, key: str) -> bytes:
    from moonpool.rewind.event_log import MAX_FILE_BYTES

    if "://" in source:
        return _fetch(source, key)
    if _HOST_AND_PORT.fullmatch(source) and not Path(source).exists():
        return _fetch(f"http://{source}", key)
    try:
        with Path(source).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        fail(f"{source} cannot be read: {error.strerror}; give the URL of a server or a saved log")
    if len(data) > MAX_FILE_BYTES:
        fail(f"{source} has more than {MAX_FILE_BYTES:,} bytes and is no event log")
    return data


def _fetch(url: str, key: str) -> bytes:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        address = f"{url.rstrip('/')}/cluster/event_log"
        answer = httpx.get(address, headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}; start one or correct the URL")
    if answer.status_code == 401:
        fail(NO_KEY)
    if answer.status_code == 403:
        try:
            fail(str(json.loads(answer.content)["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            fail(f"{url} refuses the key; give the operator's with --api-key")
    if answer.status_code != 200:
        fail(f"{url} has no event log (status {answer.status_code}): correct the URL")
    return answer.content


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
    from moonpool.runtime.explain import describe_record

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
    from moonpool.runtime.explain import describe_cluster

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

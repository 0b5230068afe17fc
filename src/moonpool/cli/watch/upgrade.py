"""`moonpool upgrade`: every process of a running cluster gives way to one from the code on disk."""

from __future__ import annotations

import time
from typing import Any

import click

from moonpool.cli.options import api_key_option, ca_file_option
from moonpool.cli.output import fail
from moonpool.cli.watch.cluster_events import bearer_key

_POLL_S = 0.3
_REQUEST_S = 60.0
_HEAD_S = 300.0
"""Seconds for the next head: it loads its code, and then calls without a kept answer may end."""


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@api_key_option
@ca_file_option
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to drain each instance within; after half of them, its requests move.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(1, 86400),
    default=600.0,
    show_default=True,
    help="Most seconds to wait for the next process of an instance.",
)
def upgrade(url: str, api_key: str | None, ca_file: str, within_s: float, wait_s: float) -> None:
    """Replace every process of the cluster at URL by one from the code on disk; answers go on.

    Install the new release first. One instance after the other drains and comes back, then head and
    supervisor. It works on the head's own machine only; workers of other machines must be started
    again by their service manager. The configuration stays the same.
    """
    server = _Server(url, bearer_key(api_key), ca_file)
    first = server.cluster()
    for instance in first["instances"]:
        if instance["draining"] is None:
            _replace_instance(server, instance, within_s, wait_s)
    for worker in first["attention"]:
        _replace(server, "attention", worker, within_s, wait_s)
    _replace_head(server, first["head"])


class _Server:
    """A running head. Each failure ends the command with one line."""

    def __init__(self, url: str, key: str, ca_file: str) -> None:
        import httpx

        from moonpool.api.connection.tls import TlsError, trusting_context

        self.url = url.rstrip("/")
        try:
            verify = trusting_context(ca_file)
        except TlsError as error:
            fail(str(error))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=_REQUEST_S, verify=verify)

    def cluster(self) -> dict[str, Any]:
        found = self._ask("GET", "/cluster", None)
        if "head" not in found:
            fail(f"{self.url} shows its processes to the operator's key only: give --api-key")
        return found

    def post(self, path: str, body: dict[str, Any]) -> None:
        self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        import httpx

        tries = 2  # the head that had the connection may have given way to the next one
        while True:
            tries -= 1
            try:
                answer = self._client.request(method, self.url + path, json=body)
                break
            except (httpx.RemoteProtocolError, httpx.ReadError) as error:
                if not tries or method != "GET":
                    fail(f"{self.url} broke off: {error}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fail(f"no server answers at {self.url}: {error}; start one or correct the URL")
        try:
            found: Any = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or answer.status_code == 404:
            fail(f"{self.url} is no moonpool server that can be upgraded: correct the URL")
        if answer.is_error:
            fail(str(found["error"]["message"]))
        return found


def _replace_instance(
    server: _Server, instance: dict[str, Any], within_s: float, wait_s: float
) -> None:
    """Replaces one instance, unless it has gone meanwhile or has another process already."""
    name = instance["instance_id"]
    now = {one["instance_id"]: one for one in server.cluster()["instances"]}.get(name)
    if now is None or now["pid"] != instance["pid"]:
        click.echo(f"{name}: it has another process already")
        return
    _replace(server, "instances", instance | {"name": name}, within_s, wait_s)


def _replace(
    server: _Server, listed: str, former: dict[str, Any], within_s: float, wait_s: float
) -> None:
    """Drains a process and waits for its successor: one of its name, or else a new one of its
    role."""
    name = former["name"]
    known = {_place(one) for one in server.cluster()[listed]}
    body = {"instance_id": name, "within_s": within_s, "returns": True}
    began_s = time.monotonic()
    server.post("/cluster/drain", body)
    while time.monotonic() - began_s < within_s + wait_s:
        time.sleep(_POLL_S)
        for one in server.cluster()[listed]:
            if _place(one) not in known and one.get("role") == former.get("role"):
                _report(name, former, one, began_s)
                return
    fail(
        f"{name} has left, and no process took its place within {wait_s:g} s: start it again, then"
        " run this command again"
    )


def _report(name: str, former: dict[str, Any], now: dict[str, Any], began_s: float) -> None:
    seconds = time.monotonic() - began_s
    click.echo(f"{name}: process {former['pid']} gave way to {now['pid']} in {seconds:.1f} s")


def _place(process: dict[str, Any]) -> tuple[str, int]:
    """What tells a process from all others of the cluster."""
    return process["host"], process["pid"]


def _replace_head(server: _Server, former: dict[str, Any]) -> None:
    began_s = time.monotonic()
    server.post("/cluster/upgrade", {})
    while time.monotonic() - began_s < _HEAD_S:
        time.sleep(_POLL_S)
        head = server.cluster()["head"]
        if head["upgrades"] > former["upgrades"]:
            _report("head", former, head, began_s)
            click.echo(f"the cluster runs release {head['release']}")
            return
        if head["upgrade_error"]:
            fail(f"the head stays as it is: {head['upgrade_error']}")
    fail(f"the head has not given way within {_HEAD_S:g} s: see its log")

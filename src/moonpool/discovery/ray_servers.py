"""The servers on a Ray cluster: named actors that serve, and replicas of Ray Serve with ports."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from moonpool.discovery.endpoint import (
    Endpoint,
    EndpointError,
    Listing,
    Notice,
    SourceError,
)
from moonpool.discovery.looks import follow_looks
from moonpool.discovery.source_text import RayActorSource, RayServeSource, server_of
from moonpool.http_client.client import (
    ConnectionFailedError,
    HttpClient,
    TooLargeError,
    header_lines,
)
from moonpool.log_limit import limited_logger
from moonpool.types import MALFORMED

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
DEFAULT_URL = "http://127.0.0.1:8265"
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
MODE_VARIABLE = "RAY_AUTH_MODE"
ANSWER_S = 30.0
"""Ray's own programs wait this long, because its dashboard may be busy."""
MOST_ROWS = 10_000
"""Ray lists no more at a time."""
MAX_BYTES = 32 << 20

Row = Mapping[str, Any]


class RayApi:
    """The HTTP API of a Ray cluster's dashboard, so that a front needs no Ray. The client
    authenticates like Ray's own programs. `url`: the address of Ray's API; "" means that of
    `RAY_API_SERVER_ADDRESS`, or of this machine."""

    def __init__(self, url: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """Raises SourceError."""
        self.url = (url or environment.get(ADDRESS_VARIABLE) or DEFAULT_URL).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise SourceError(
                f"{self.url!r} is no address of Ray's dashboard: use http://HOST:PORT"
            )
        self._environment = environment

    async def rows(self, kind: str, **wanted: str) -> list[Row]:
        """Returns the rows of a table, such as "actors", whose columns have these values. Raises
        SourceError."""
        asked: list[tuple[str, str]] = [("limit", str(MOST_ROWS)), ("timeout", str(int(ANSWER_S)))]
        for column, value in wanted.items():
            asked += [("filter_keys", column), ("filter_predicates", "="), ("filter_values", value)]
        try:
            return read_rows(await self._get(f"/api/v0/{kind}", asked))
        except SourceError as error:
            raise SourceError(f"Ray's dashboard at {self.url}, its {kind}: {error}") from None

    async def described(self, path: str) -> Row:
        """Returns the object at a path of the API. Raises SourceError."""
        try:
            return read_object(await self._get(path))
        except SourceError as error:
            raise SourceError(f"Ray's dashboard at {self.url}: {error}") from None

    async def _get(self, path: str, asked: Sequence[tuple[str, str]] = ()) -> bytes:
        """Raises SourceError."""
        headers, target = self._headers(), f"{path}?{urlencode(asked)}" if asked else path
        try:
            http = HttpClient(self.url, connect_s=ANSWER_S)
            try:
                async with (
                    asyncio.timeout(ANSWER_S),
                    http.stream("GET", target, b"", headers) as found,
                ):
                    status, body = found.status, await found.read(MAX_BYTES)
            finally:
                http.close()
        except (ConnectionFailedError, TooLargeError, ValueError) as error:
            raise SourceError(_line(str(error))) from None
        except TimeoutError:
            raise SourceError(f"it did not answer within {ANSWER_S:g} s") from None
        if status != 200:
            raise SourceError(_refusal(status, body))
        return body

    def _headers(self) -> bytes:
        """The token is read for each call, because it may be replaced. Raises SourceError."""
        if self._environment.get(MODE_VARIABLE, "").lower() == "disabled":
            return b""
        token = self._environment.get(TOKEN_VARIABLE, "")
        named = self._environment.get(TOKEN_FILE_VARIABLE, "")
        file = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not token and (named or file.is_file()):
            try:
                token = file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read the token of Ray in {file}: {error}") from None
        try:
            return header_lines({"Authorization": f"Bearer {token}"}) if token else b""
        except ValueError:
            raise SourceError("the token of Ray has characters that no header can have") from None


def read_object(data: bytes) -> Row:
    """Raises SourceError."""
    try:
        found = msgspec.json.decode(data)
    except MALFORMED:
        found = None
    if not isinstance(found, dict):
        raise SourceError("it sent no JSON object")
    return found


def read_rows(data: bytes) -> list[Row]:
    """Returns the rows of a table, as `ray list` gets them. Raises SourceError, also if some rows
    were left out."""
    found = read_object(data)
    try:
        if not found["result"]:
            raise SourceError(_line(str(found.get("msg", ""))))
        table = found["data"]["result"]
        rows, num_cut = table["result"], table["total"] - table["num_after_truncation"]
        num_cut += table["num_filtered"] - len(rows)
    except (KeyError, TypeError):
        raise SourceError("it sent another form than `ray list` reads") from None
    if num_cut:
        raise SourceError(f"it left out {num_cut}")
    return [row for row in rows if isinstance(row, dict)]


def _refusal(status: int, body: bytes) -> str:
    text = _line(body.decode(errors="replace"))
    if status in (401, 403):
        text = f"it wants another token: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}"
    return f"it responded with {status}: {text}"


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


log = limited_logger("moonpool.discovery")

LOOK_S = 2.0
ALIVE = "ALIVE"
RUNNING = "RUNNING"
REPLICA = "SERVE_REPLICA::"
"""How the names of Ray Serve's replicas begin; its proxies have others."""
NO_PORTS = (
    "its replicas have no ports of their own: run `ray start` on each node with"
    " RAY_SERVE_ENABLE_DIRECT_INGRESS=1, for Serve LLM also"
    " RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1"
)
_OWN_PORT = re.compile(r"(?P<name>.+):(?P<port>\d{1,5})", re.ASCII)
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)

Place = tuple[str, str, object]
"""The name, host and port of a server."""


class RayServers:
    """The servers that a source on a Ray cluster lists. An actor that moves is another server."""

    def __init__(self, source: RayActorSource | RayServeSource) -> None:
        """Raises SourceError."""
        self._source = source
        self._api = RayApi(source.api)
        self._notice, self._failing = Notice(log), Notice(log)

    async def check(self) -> None:
        """Like `EndpointSource.check`."""
        await self._look()

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`."""
        await follow_looks(self._look, lambda _: LOOK_S, update, self._failing)

    async def _look(self) -> frozenset[Endpoint]:
        """Raises SourceError."""
        match self._source:
            case RayActorSource():
                places = await actor_places(self._source, self._api)
            case RayServeSource(application):
                details = await self._api.described("/api/serve/applications/")
                places = read_replicas(details, application)
        found, problems = servers_at(places, self._source)
        self._notice.say("; ".join(problems))
        return found


async def actor_places(source: RayActorSource, api: RayApi) -> list[Place]:
    """Returns the places of the actors that are alive. Raises SourceError."""
    wanted = {"ray_namespace": source.namespace} if source.namespace else {}
    actors = await api.rows("actors", state=ALIVE, **wanted)
    pattern = re.compile(".*".join(map(re.escape, source.name.split("*"))), re.DOTALL)
    named = [each for each in actors if pattern.fullmatch(str(each.get("name") or ""))]
    nodes = await api.rows("nodes", state=ALIVE) if named else []
    hosts = {str(node.get("node_id")): str(node.get("node_ip")) for node in nodes}
    found = (_actor_place(actor, hosts, source.port) for actor in named)
    return [place for place in found if place is not None]


def read_replicas(details: Row, application: str) -> list[Place]:
    """Returns the replicas of an application, from Ray Serve's own description. Raises
    SourceError."""
    if not details.get("controller_info"):  # also missing while Ray's state is being restored
        raise SourceError("Ray Serve does not run there")
    try:
        groups = [one for one in details["target_groups"] if one["app_name"] == application]
        state = (details["applications"].get(application) or {}).get("status", "")
        places = list(_replica_places(groups))
    except (KeyError, TypeError, AttributeError):
        raise SourceError("Ray Serve describes itself in an unknown form") from None
    if state == RUNNING and not groups:
        raise SourceError(f"the application {application!r} of Ray Serve: {NO_PORTS}")
    return places


def _actor_place(actor: Row, hosts: dict[str, str], port: int | None) -> Place | None:
    """Returns None if its node is gone."""
    name, host = str(actor["name"]), hosts.get(str(actor.get("node_id")))
    own = _OWN_PORT.fullmatch(name)
    if host is None:
        return None
    if own is not None:
        return own["name"], host, own["port"]
    return name, host, "" if port is None else port


def _replica_places(groups: Iterable[Row]) -> Iterator[Place]:
    """Leaves out the proxies, which stand for an application without replicas. Raises KeyError,
    TypeError or AttributeError for another form."""
    for group in groups:
        if group["protocol"] != "HTTP":
            continue
        for target in group["targets"]:
            if target["name"].startswith(REPLICA):
                yield target["name"].removeprefix(REPLICA), target["ip"], target["port"]


def servers_at(
    places: Iterable[Place], source: RayActorSource | RayServeSource
) -> tuple[frozenset[Endpoint], list[str]]:
    """The servers at these places, and why others are left out."""
    found: dict[str, Endpoint] = {}
    problems: list[str] = []
    for given, host, port in sorted(places, key=str):
        name = _NO_NAME.sub("-", given).strip("-._")[:128]
        try:
            if port == "":
                raise EndpointError(f"{name}: give ?port=, or end its name with :PORT")
            server = server_of(source, name, host, port)
            if name in found:
                raise EndpointError(f"a second {name!r}")
        except EndpointError as error:
            problems.append(f"{error}; it is left out")
        else:
            found[name] = server
    return frozenset(found.values()), sorted(problems)

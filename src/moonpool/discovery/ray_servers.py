"""The servers on a Ray cluster: named actors that serve, and replicas of Ray Serve with ports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from moonpool.discovery.endpoint import (
    Endpoint,
    EndpointError,
    Listing,
    Notice,
    SourceError,
)
from moonpool.discovery.looks import follow_looks
from moonpool.discovery.ray_api import RayApi, Row
from moonpool.discovery.source_text import RayActorSource, RayServeSource, server_of
from moonpool.log_limit import limited_logger

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
"""Name, host and port of a server."""


class RayServers:
    """What a source on a Ray cluster lists. An actor that moves is another server."""

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
    """The replicas of an application, as Ray Serve describes itself. Raises SourceError."""
    if not details.get("controller_info"):  # also while Ray's own state is being restored
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
    """None: its node is gone."""
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

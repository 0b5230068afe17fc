"""Endpoints from a Kubernetes API: the pods that an InferencePool selects.

A pod is an endpoint while it is ready and not told to end; with several target ports, one for each
port. The priorities of the pool's InferenceObjectives come along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from moonpool.discovery.endpoint import Listing, Notice
from moonpool.discovery.kubernetes_api import PODS, ApiServer, Object, ObjectList
from moonpool.discovery.pods import read_pods
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.epp")

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"


class InferencePool:
    """Follows the pool `name` of a namespace."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._namespace = namespace
        self._name = name
        self._ports: tuple[int, ...] = ()
        self._fails_open: bool | None = None
        self._selector: str | None = None  # None until the pool is known
        self._changed = asyncio.Event()
        self._objectives: dict[str, int] = {}
        self._pods: Mapping[str, Object] = {}
        self._notice, self._pool_notice = Notice(log), Notice(log)
        self._before: Listing | None = None

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`."""

        def tell() -> None:
            endpoints, problems = read_pods(self._pods, self._ports)
            self._notice.say("; ".join(problems))
            listing = Listing(
                endpoints=tuple(endpoints),
                objectives=dict(self._objectives),
                fails_open=self._fails_open,
            )
            if listing != self._before:
                self._before = listing
                update(listing)

        def on_pool(objects: Mapping[str, Object]) -> None:
            self._read_pool(objects.get(self._name))
            tell()

        def on_objectives(objects: Mapping[str, Object]) -> None:
            self._objectives = _priorities(objects, self._name)
            tell()

        def on_pods(objects: Mapping[str, Object]) -> None:
            self._pods = objects
            tell()

        namespace = self._namespace
        field = f"metadata.name={self._name}"
        pool = ObjectList(self._server, POOLS.format(namespace), field=field)
        objectives = ObjectList(self._server, OBJECTIVES.format(namespace))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pool.follow(on_pool))
                group.create_task(objectives.follow(on_objectives, optional=True))
                group.create_task(self._follow_pods(on_pods))
        finally:
            self._server.close()

    async def _follow_pods(self, on_pods: Callable[[Mapping[str, Object]], None]) -> None:
        """Follows the pods again with each selector of the pool."""
        while True:
            self._changed.clear()
            selector = self._selector
            if selector is None:
                await self._changed.wait()
                continue
            pods = ObjectList(self._server, PODS.format(self._namespace), selector)
            following = asyncio.create_task(pods.follow(on_pods))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({following, changed}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            finally:
                following.cancel()
                changed.cancel()

    def _read_pool(self, pool: Object | None) -> None:
        """If a pool is gone, its endpoints stay unchanged, because the pool may be written
        again."""
        if pool is None:
            where = f"in namespace {self._namespace}"
            self._pool_notice.say(f"there is no InferencePool {self._name} {where}")
            return
        spec = pool.get("spec") or {}
        labels = (spec.get("selector") or {}).get("matchLabels") or {}
        if not labels:  # no labels would select all pods of the namespace
            self._pool_notice.say(f"the InferencePool {self._name} selects no pods")
            return
        self._pool_notice.say("")
        ports = (each.get("number") for each in spec.get("targetPorts") or ())
        self._ports = tuple(port for port in ports if isinstance(port, int))
        mode = (spec.get("endpointPickerRef") or {}).get("failureMode")
        self._fails_open = None if mode is None else mode == "FailOpen"
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        if selector != self._selector:
            self._selector = selector
            self._changed.set()


def _priorities(objects: Mapping[str, Object], pool: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, each in objects.items():
        spec = each.get("spec") or {}
        priority = spec.get("priority", 0)
        if (spec.get("poolRef") or {}).get("name") == pool and isinstance(priority, int):
            found[name] = priority
    return found

"""The servers in the ready pods of a Kubernetes cluster that have certain labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moonpool.discovery.endpoints_file import labelled_servers
from moonpool.discovery.kubernetes_api import (
    PODS,
    ApiServer,
    KubernetesError,
    Object,
    ObjectList,
    is_ready,
    own_namespace,
)
from moonpool.discovery.listed_server import ListedServer, PodSource, SourceError


class LabelledPods:
    """`run` follows them; `servers` and `problems` are as last heard."""

    def __init__(self, source: PodSource) -> None:
        """Raises SourceError outside of a cluster."""
        self._port = source.port
        self._server = ApiServer(source.api, None, None) if source.api else ApiServer.of_pod()
        path = PODS.format(source.namespace or own_namespace())
        self._pods = ObjectList(self._server, path, source.selector)
        self.servers: list[ListedServer] = []
        self.problems: list[str] = []

    async def run(self, changed: Callable[[], None]) -> None:
        """Until cancelled. Where the API fails for a time, what it said last holds."""

        def update(pods: Mapping[str, Object]) -> None:
            self.servers, self.problems = read_pods(pods, self._port)
            changed()

        try:
            await self._pods.follow(update)
        finally:
            await self._server.close()

    async def check(self) -> None:
        """Reads them once. Raises SourceError."""
        try:
            await self._pods.check()
        except KubernetesError as error:
            raise SourceError(f"the Kubernetes API at {self._server.url}: {error}") from None
        finally:
            await self._server.close()


def read_pods(pods: Mapping[str, Object], port: int) -> tuple[list[ListedServer], list[str]]:
    """Returns the servers in pods that are ready, and why others are left out. A pod with the name
    of one that has ended, at another address, is another server."""
    servers: list[ListedServer] = []
    problems: list[str] = []
    for name, pod in sorted(pods.items()):
        if is_ready(pod):
            labels = (pod.get("metadata") or {}).get("labels") or {}
            try:
                servers += labelled_servers(name, str(pod["status"]["podIP"]), port, labels)
            except SourceError as error:
                problems.append(f"the pod {name}: {error}")
    return servers, problems

"""The servers in the ready pods of a Kubernetes cluster that have certain labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moonpool.discovery.endpoint import (
    OLDER_LABELS,
    Endpoint,
    EndpointError,
    Listing,
    Notice,
    SourceError,
    has_older_labels,
    labelled_endpoint,
)
from moonpool.discovery.kubernetes_api import (
    PODS,
    ApiServer,
    KubernetesError,
    Object,
    ObjectList,
    is_ready,
    own_namespace,
)
from moonpool.discovery.source_text import PodSource
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.discovery")


class LabelledPods:
    def __init__(self, source: PodSource) -> None:
        """Raises SourceError outside of a cluster."""
        self._port = source.port
        self._server = ApiServer(source.api, None, None) if source.api else ApiServer.of_pod()
        path = PODS.format(source.namespace or own_namespace())
        self._pods = ObjectList(self._server, path, source.selector)
        self._notice = Notice(log)

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`."""

        def on_pods(pods: Mapping[str, Object]) -> None:
            endpoints, problems = read_pods(pods, [self._port])
            self._notice.say("; ".join(problems))
            update(Listing(endpoints=tuple(endpoints)))

        try:
            await self._pods.follow(on_pods)
        finally:
            self._server.close()

    async def check(self) -> None:
        """Like `EndpointSource.check`."""
        try:
            await self._pods.check()
        except KubernetesError as error:
            raise SourceError(f"the Kubernetes API at {self._server.url}: {error}") from None
        finally:
            self._server.close()


def read_pods(pods: Mapping[str, Object], ports: Sequence[int]) -> tuple[list[Endpoint], list[str]]:
    """Returns the servers in ready pods, one for each port, and why other pods are left out. A pod
    with the name of one that has ended, at another address, is another server."""
    endpoints: list[Endpoint] = []
    problems: list[str] = []
    is_older = False
    for name, pod in sorted(pods.items()):
        if not is_ready(pod):
            continue
        labels = (pod.get("metadata") or {}).get("labels") or {}
        is_older |= has_older_labels(labels)
        try:
            for number, port in enumerate(ports):
                own = name if len(ports) == 1 else f"{name}.{number}"
                endpoint = labelled_endpoint(own, str(pod["status"]["podIP"]), port, labels)
                if endpoint is not None:
                    endpoints.append(endpoint)
        except EndpointError as error:
            problems.append(f"the pod {error}; it is left out")
    if is_older:
        problems.append(OLDER_LABELS)
    return endpoints, problems

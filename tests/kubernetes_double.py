"""Runs kmock in place of a Kubernetes API server, with the resources that moonpool's sources of
endpoints read."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import kmock

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"
PODS = "/api/v1/namespaces/{}/pods"
LISTED = (POOLS, OBJECTIVES, PODS)
START_S = 60.0


def emulator() -> Any:
    found = kmock.KubernetesEmulator()
    for version, plural in (
        ("v1", "pods"),
        ("inference.networking.k8s.io/v1", "inferencepools"),
        ("inference.networking.x-k8s.io/v1alpha2", "inferenceobjectives"),
    ):
        group, _, name = version.rpartition("/")
        key = kmock.resource(group, name, plural)
        found.resources[key] = {"namespaced": True, "verbs": ["list", "watch"]}
    return found


class ApiThread:
    """Runs the API in a separate thread, for tests of processes."""

    def __init__(self) -> None:
        self.url = ""
        self._is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with kmock.Server(emulator()) as server:
            self.url = str(server.url).rstrip("/")
            self._is_up.set()
            await self._end.wait()

    def __enter__(self) -> ApiThread:
        self._thread.start()
        assert self._is_up.wait(START_S)
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S)
        self._loop.close()

    def create(self, path: str, made: dict[str, Any]) -> None:
        response = httpx.post(f"{self.url}{path}", json=made, timeout=60)
        assert response.status_code == 200, response.text

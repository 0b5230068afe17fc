"""Tests endpoints from a Kubernetes API, with kmock in place of its server, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

kmock = pytest.importorskip("kmock")

import httpx  # noqa: E402

from moonpool.discovery import kubernetes_api  # noqa: E402
from moonpool.discovery.endpoint import Listing, SourceError  # noqa: E402
from moonpool.discovery.kubernetes_api import ApiServer, own_namespace  # noqa: E402
from moonpool.epp.inference_pool import InferencePool  # noqa: E402
from tests import kubernetes_double  # noqa: E402

POOLS, OBJECTIVES, PODS = (path.format("ns") for path in kubernetes_double.LISTED)
Object = dict[str, Any]


def pool(*ports: int, mode: str = "FailClose", app: str = "vllm") -> Object:
    return {
        "metadata": {"name": "llama", "namespace": "ns"},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "failureMode": mode},
        },
    }


def pod(name: str, ip: str, ready: bool = True, role: str = "") -> Object:
    labels = {"app": "vllm"} | ({"llm-d.ai/role": role} if role else {})
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "status": {"podIP": ip, "conditions": [condition]},
    }


class Cluster:
    """Holds a Kubernetes API, and what a picker has heard of it."""

    def __init__(self, emulator: Any, url: str, token: Path | None) -> None:
        self.emulator, self.url, self.token = emulator, url, token
        self.task: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(base_url=url)
        self.heard: asyncio.Queue[Listing] = asyncio.Queue()
        self.last = Listing()

    async def write(self, method: str, path: str, body: Object | None = None) -> None:
        response = await self._http.request(method, path, json=body)
        assert response.status_code == 200, response.text

    async def until(self, *addresses: str) -> Listing:
        async with asyncio.timeout(60):
            while [each.address for each in self.last.endpoints] != list(addresses):
                self.last = await self.heard.get()
        return self.last

    def queries(self, path: str) -> list[dict[str, str]]:
        """Returns the queries of all calls that read this path."""
        return [
            dict(each.params)
            for each in self.emulator
            if each.url.path == path and str(each.method).upper().endswith("GET")
        ]

    async def until_asked(
        self, path: str, holds: Callable[[list[dict[str, str]]], bool]
    ) -> list[dict[str, str]]:
        async with asyncio.timeout(60):
            while not holds(self.queries(path)):
                await asyncio.sleep(0.02)
        return self.queries(path)

    def follow(self) -> None:
        source = InferencePool(ApiServer(self.url, self.token, None), "ns", "llama")
        self.task = asyncio.create_task(source.follow(self.heard.put_nowait))


@asynccontextmanager
async def a_cluster(token: Path | None = None, follows: bool = True) -> AsyncIterator[Cluster]:
    emulator = kubernetes_double.emulator()
    async with kmock.Server(emulator) as server:
        cluster = Cluster(emulator, str(server.url).rstrip("/"), token)
        if follows:
            cluster.follow()
        try:
            yield cluster
        finally:
            if cluster.task is not None:
                cluster.task.cancel()
                await asyncio.gather(cluster.task, return_exceptions=True)


async def pods_come_and_go() -> None:
    async with a_cluster() as cluster:
        await cluster.write("POST", POOLS, pool(8000))
        await cluster.write("POST", PODS, pod("a", "10.0.0.1", role="prefill"))
        await cluster.until("10.0.0.1:8000")
        await cluster.write("POST", PODS, pod("b", "10.0.0.2", ready=False))
        await cluster.write("POST", PODS, pod("c", ""))
        await cluster.write("PATCH", f"{PODS}/b", pod("b", "10.0.0.2"))
        found = await cluster.until("10.0.0.1:8000", "10.0.0.2:8000")
        assert [str(each.role) for each in found.endpoints] == ["prefill", "mixed"]
        assert found.fails_open is False
        # A pod leaves when it is told to end, before it is gone.
        leaving = {"metadata": {"finalizers": ["x/y"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
        await cluster.write("PATCH", f"{PODS}/a", leaving)
        await cluster.until("10.0.0.2:8000")
        await cluster.write("DELETE", f"{PODS}/b")
        await cluster.until()
        # Each target port is an endpoint, like the ranks of a data-parallel server.
        await cluster.write("PATCH", f"{POOLS}/llama", pool(8000, 8001, mode="FailOpen"))
        await cluster.write("POST", PODS, pod("d", "10.0.0.4"))
        found = await cluster.until("10.0.0.4:8000", "10.0.0.4:8001")
        assert [each.name for each in found.endpoints] == ["d.0", "d.1"]
        assert found.fails_open is True


def test_pods_come_and_go() -> None:
    asyncio.run(pods_come_and_go())


async def selectors_and_objectives() -> None:
    async with a_cluster() as cluster:
        await cluster.write("POST", POOLS, pool(8000))
        await cluster.write("POST", PODS, pod("a", "10.0.0.1"))
        await cluster.until("10.0.0.1:8000")
        listed = await cluster.until_asked(PODS, lambda asked: any("watch" in e for e in asked))
        assert {each["labelSelector"] for each in listed} == {"app=vllm"}
        watch = next(each for each in listed if "watch" in each)
        assert watch["resourceVersion"] and watch["allowWatchBookmarks"] == "true"
        await cluster.write("PATCH", f"{POOLS}/llama", pool(8000, app="other"))
        await cluster.until_asked(
            PODS, lambda asked: any(each["labelSelector"] == "app=other" for each in asked)
        )
        for name, of, priority in (("fast", "llama", 7), ("far", "else", 9)):
            objective = {
                "metadata": {"name": name, "namespace": "ns"},
                "spec": {"poolRef": {"name": of}, "priority": priority},
            }
            await cluster.write("POST", OBJECTIVES, objective)
        async with asyncio.timeout(60):
            while cluster.last.objectives != {"fast": 7}:
                cluster.last = await cluster.heard.get()


def test_selectors_and_objectives_are_followed() -> None:
    asyncio.run(selectors_and_objectives())


async def broken_watches(monkeypatch: pytest.MonkeyPatch, token: Path) -> None:
    monkeypatch.setattr(kubernetes_api, "AGAIN_S", 0.02)
    async with a_cluster(token, follows=False) as cluster:
        too_old = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
        pods = kmock.resource("", "v1", "pods")
        # lists only the first endpoint
        cluster.emulator[kmock.action.WATCH, pods][:1] << (too_old,)
        cluster.emulator[kmock.action.LIST, pods][:1] << 403
        await cluster.write("POST", POOLS, pool(8000))
        await cluster.write("POST", PODS, pod("a", "10.0.0.1"))
        cluster.follow()
        await cluster.until("10.0.0.1:8000")
        token.write_text("second\n")
        await cluster.until_asked(PODS, lambda asked: sum("watch" in each for each in asked) > 1)
        await cluster.write("POST", PODS, pod("b", "10.0.0.2"))
        await cluster.until("10.0.0.1:8000", "10.0.0.2:8000")
        assert sum("watch" not in each for each in cluster.queries(PODS)) == 3  # 403, 410, all
        logins = {
            value
            for each in cluster.emulator
            for name, value in each.headers.items()
            if name.lower() == "authorization"
        }
        assert "Bearer first" in logins


def test_a_watch_that_is_too_old_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    asyncio.run(broken_watches(monkeypatch, token))


def test_outside_of_a_cluster() -> None:
    with pytest.raises(SourceError, match="no pod of a Kubernetes cluster"):
        ApiServer.of_pod({})
    assert own_namespace({"NAMESPACE": "team"}) == "team"
    assert own_namespace({}) == "default"

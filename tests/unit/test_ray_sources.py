"""Tests `--vllm-endpoints ray://...` and `ray-serve://...` with a double of Ray's dashboard over
real HTTP, in the form of Ray 2.60. `tests/live/test_ray_sources.py` has a real Ray."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.discovery import ray_servers
from moonpool.discovery.endpoint import Endpoint, Listing, SourceError
from moonpool.discovery.looks import Looks
from moonpool.discovery.ray_servers import RayApi
from moonpool.discovery.source_text import RayActorSource, RayServeSource, parse_source
from moonpool.discovery.sources import open_source
from moonpool.discovery.watch import Discovery, check_source
from moonpool.types import Role


class Dashboard:
    """`actors` and `nodes` are rows of `ray list`, and `serve` is Ray Serve's status. `token` is
    the token that the double requires. `status` is the status of its answers if it fails."""

    def __init__(self) -> None:
        self.actors: list[dict[str, Any]] = []
        self.nodes = [node("n0", "10.0.0.1"), node("n1", "10.0.0.2")]
        self.serve: dict[str, Any] = {"controller_info": {}, "applications": {}}
        self.token, self.status, self.num_cut, self.body = "", 200, 0, b""
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = f"Bearer {double.token}" if double.token else None
                right = self.headers["authorization"] == wanted
                body = double.body or json.dumps(double.answer(self.path)).encode()
                self.send_response(double.status if right else 401)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> dict[str, Any]:
        split = urlsplit(path)
        if split.path == "/api/serve/applications/":
            return self.serve
        asked = parse_qs(split.query)
        wanted = dict(zip(asked["filter_keys"], asked["filter_values"], strict=True))
        rows = {"/api/v0/actors": self.actors, "/api/v0/nodes": self.nodes}[split.path]
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        table = {
            "total": len(rows) + self.num_cut,
            "num_after_truncation": len(rows),
            "num_filtered": len(found),
            "result": found,
        }
        return {"result": True, "msg": "", "data": {"result": table}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def node(node_id: str, ip: str) -> dict[str, Any]:
    return {"node_id": node_id, "node_ip": ip, "state": "ALIVE"}


def actor(name: str | None, node_id: str = "n0", **more: str) -> dict[str, Any]:
    row = {"name": name, "node_id": node_id, "state": "ALIVE", "ray_namespace": "llm"}
    return row | more


def replicas(*ports: int, app: str = "app", kind: str = "SERVE_REPLICA::app#LLM#") -> Any:
    targets = [{"ip": "10.0.0.1", "port": port, "name": f"{kind}r{port}"} for port in ports]
    return {"app_name": app, "protocol": "HTTP", "targets": targets}


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dashboard]:
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Dashboard()
    yield made
    made.close()


def servers(source: str, dashboard: Dashboard) -> dict[str, Endpoint]:
    """Returns the first listing of a source, by name. Raises SourceError."""

    async def listing() -> Listing:
        mark = "&" if "?" in source else "?"
        text = f"{source}{mark}api={quote(dashboard.url, safe='')}"
        await check_source(text)
        heard: asyncio.Queue[Listing] = asyncio.Queue()
        task = asyncio.create_task(open_source(parse_source(text)).follow(heard.put_nowait))
        try:
            return await asyncio.wait_for(heard.get(), 60)
        finally:
            task.cancel()

    return {each.name: each for each in asyncio.run(listing()).endpoints}


def test_sources_are_read() -> None:
    assert parse_source("ray://llm/vllm-*?port=8000") == RayActorSource("llm", "vllm-*", 8000)
    found = parse_source("ray:///a%2Fb?role=decode&events=5557&replay=5558&ranks=2&api=http://h:1")
    assert found == RayActorSource("", "a/b", None, Role.DECODE, 5557, 5558, 2, "http://h:1")
    assert parse_source("ray-serve://app?role=prefill") == RayServeSource("app", Role.PREFILL)


@pytest.mark.parametrize(
    "text",
    [
        "ray://10.0.0.1:10001",  # has the address for Ray clients
        "ray://10.0.0.1:10001/vllm?port=8000",
        "ray://llm",
        "ray://llm/",
        "ray://llm/vllm?port=0",
        "ray://llm/vllm?port=8000&port=8001",
        "ray://llm/vllm?ports=8000",
        "ray://llm/vllm#1?port=8000",
        "ray://llm/vllm?port=8000&role=cook",
        "ray://llm/vllm?port=8000&replay=5558",
        "ray://llm/vllm?port=8000&ranks=0",
        "ray://llm/vllm?port=8000&api=h:8265",
        "ray-serve://",
        "ray-serve://app/more",
        "ray-serve://app?port=8000",
        "rays://llm/vllm",
    ],
)
def test_what_names_no_servers_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="is no source: "):
        parse_source(text)


def test_actors_that_are_alive_are_servers(dashboard: Dashboard) -> None:
    dashboard.actors = [
        actor("vllm-0"),
        actor("vllm-1:8001", "n1"),
        actor("vllm-2", state="DEAD"),
        actor("vllm-3", state="RESTARTING"),
        actor("vllm-4", "gone"),
        actor("vllm-5", ray_namespace="other"),
        actor("other"),
        actor(None),
    ]
    found = servers("ray://llm/vllm-*?port=8000&role=decode&events=5557", dashboard)
    assert {name: each.place for name, each in found.items()} == {
        "vllm-0": "http://10.0.0.1:8000,tcp://10.0.0.1:5557",
        "vllm-1": "http://10.0.0.2:8001,tcp://10.0.0.2:5557",
    }
    assert {each.role for each in found.values()} == {Role.DECODE}
    assert set(servers("ray:///vllm-*?port=8000", dashboard)) == {"vllm-0", "vllm-1", "vllm-5"}
    assert set(servers("ray://llm/vllm-*", dashboard)) == {"vllm-1"}, "the others have no port"


def test_names_that_ray_allows_become_names_of_instances(dashboard: Dashboard) -> None:
    dashboard.actors = [actor("a/b#c"), actor("a b c"), actor("é"), actor("x.y:70000")]
    assert set(servers("ray://llm/*?port=8000", dashboard)) == {"a-b-c"}


def test_replicas_of_an_application_are_servers(dashboard: Dashboard) -> None:
    dashboard.serve = {
        "controller_info": {"node_ip": "10.0.0.1"},
        "applications": {"app": {"status": "RUNNING"}},
        "target_groups": [
            replicas(30000, 30001),
            replicas(8000, kind="SERVE_PROXY_ACTOR-"),
            replicas(30002, app="other"),
            replicas(40000) | {"protocol": "gRPC"},
        ],
    }
    found = servers("ray-serve://app", dashboard)
    assert {name: each.address for name, each in found.items()} == {
        "app-LLM-r30000": "10.0.0.1:30000",
        "app-LLM-r30001": "10.0.0.1:30001",
    }
    assert servers("ray-serve://missing", dashboard) == {}, "it may be deployed later"
    dashboard.serve["target_groups"] = [replicas(8000, kind="SERVE_PROXY_ACTOR-")]
    assert servers("ray-serve://app", dashboard) == {}, "it was scaled down to none"
    dashboard.serve["target_groups"] = [replicas(8000, app="", kind="SERVE_PROXY_ACTOR-")]
    with pytest.raises(SourceError, match="RAY_SERVE_ENABLE_DIRECT_INGRESS=1"):
        servers("ray-serve://app", dashboard)


def test_what_fails_is_one_line(dashboard: Dashboard) -> None:
    def said(source: str) -> str:
        with pytest.raises(SourceError) as raised:
            servers(source, dashboard)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
        return str(raised.value)

    actors = "ray://llm/vllm?port=8000"
    assert "Ray Serve does not run" in said("ray-serve://app")
    dashboard.num_cut = 3
    assert "its actors: it left out 3" in said(actors)
    dashboard.num_cut = 0
    for body in (b"[]", b"\xff", b"{}", b'{"result": true, "data": null}', b"[" * 9000):
        dashboard.body = body
        assert "sent" in said(actors)
        assert said("ray-serve://app")
    dashboard.body = b'{"result": false, "msg": "the GCS is away"}'
    assert "the GCS is away" in said(actors)
    dashboard.body = json.dumps(
        {"controller_info": 1, "applications": [], "target_groups": [{"app_name": "app"}]}
    ).encode()
    assert "unknown form" in said("ray-serve://app")
    dashboard.status, dashboard.body = 500, b"no\nway"
    assert "responded with 500: no way" in said(actors)
    dashboard.close()
    assert "Ray's dashboard at http://127.0.0.1" in said(actors)


def test_the_token_of_ray_is_sent(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.actors, dashboard.token = [actor("vllm")], "secret"
    source = "ray://llm/vllm?port=8000"
    with pytest.raises(SourceError, match="set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"):
        servers(source, dashboard)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert set(servers(source, dashboard)) == {"vllm"}
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(SourceError, match="cannot read the token"):
        servers(source, dashboard)
    file.write_text("secret\n")
    assert set(servers(source, dashboard)) == {"vllm"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    dashboard.token = ""
    assert set(servers(source, dashboard)) == {"vllm"}, "and no token is sent where Ray wants none"


def test_the_dashboard_is_found_as_rays_programs_find_it() -> None:
    assert RayApi("", {}).url == "http://127.0.0.1:8265"
    assert RayApi("", {"RAY_API_SERVER_ADDRESS": "http://h:1/"}).url == "http://h:1"
    assert RayApi("http://i:2", {"RAY_API_SERVER_ADDRESS": "http://h:1"}).url == "http://i:2"
    with pytest.raises(SourceError, match="use http"):
        RayApi("", {"RAY_API_SERVER_ADDRESS": "h:8265"})


def test_actors_join_move_and_leave(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_servers, "LOOK_S", 0.02)

    async def run() -> None:
        heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        discovery = Discovery(
            [f"ray://llm/vllm-*?port=8000&api={dashboard.url}"],
            lambda server: heard.put_nowait(("join", server.place)),
            lambda server: heard.put_nowait(("drain", server.place)),
        )
        running = asyncio.create_task(discovery.run())
        try:
            async with asyncio.timeout(60):
                dashboard.actors = [actor("vllm-0")]
                assert await heard.get() == ("join", "http://10.0.0.1:8000")
                dashboard.status = 503  # while the dashboard restarts, the servers stay
                await asyncio.sleep(0.2)
                dashboard.actors = [actor("vllm-0", "n1")]  # a node has died
                assert heard.empty()
                dashboard.status = 200
                assert await heard.get() == ("drain", "http://10.0.0.1:8000")
                assert await heard.get() == ("join", "http://10.0.0.2:8000")
                dashboard.actors = []
                assert await heard.get() == ("drain", "http://10.0.0.2:8000")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("12"))))
def test_one_is_gone_when_two_looks_lack_it(looks: list[dict[str, str]]) -> None:
    seen = Looks()
    there: frozenset[Endpoint] = frozenset()
    for before, found in zip([{}, *looks], looks, strict=False):
        now = seen.add(frozenset(Endpoint(name, host, 80) for name, host in found.items()))
        there = there if now is None else now
        assert {each.name: each.host for each in there} == before | found
        assert len(there) == len(before | found), "none is there twice"

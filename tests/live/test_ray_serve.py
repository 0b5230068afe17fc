"""The Conductor is the request router of a Ray Serve deployment. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.ray_nodes import MOST_STARTS, NODE, SETTINGS
from tests.live.waiting import WAIT_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

STEP_S = 0.01


class Deployed:
    """Runs a deployment of three replicas that stream, behind the router."""

    def __init__(self, serve: Any, name: str, **settings: Any) -> None:
        from ray.serve.config import RequestRouterConfig

        router = RequestRouterConfig(
            request_router_class="moonpool.ray.ConductorRouter", request_router_kwargs=settings
        )

        @serve.deployment(
            name="Echo", num_replicas=3, max_ongoing_requests=64, request_router_config=router
        )
        class Echo:
            async def __call__(self, request: Any) -> str:
                return str(serve.get_replica_context().replica_id.unique_id)

            async def stream(self, body: dict[str, Any]) -> Any:
                own = serve.get_replica_context().replica_id.unique_id
                for number in range(body["max_tokens"]):
                    await asyncio.sleep(STEP_S)
                    yield f"data: {json.dumps([own, number])}\n\n"

        self.name = name
        self.handle = serve.run(Echo.bind(), name=name, route_prefix=f"/{name}")

    async def call(self, text: str, max_tokens: int = 8) -> str:
        """Returns the replica that has answered."""
        stream = self.handle.options(stream=True, method_name="stream")
        body = {"prompt": text, "max_tokens": max_tokens}
        items = [json.loads(item[6:]) async for item in stream.remote(body)]
        assert [number for _, number in items] == list(range(max_tokens))
        return str(items[0][0])

    async def described(self) -> dict[str, Any]:
        return await self.conductor.describe.remote()

    @property
    def conductor(self) -> Any:
        import ray

        return ray.get_actor(f"conductor/{self.name}/Echo", namespace="moonpool")


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def serve(http_port: int) -> Iterator[Any]:
    import ray
    from ray import serve as ray_serve

    os.environ.update({key: SETTINGS[key] for key in SETTINGS if "gcs" not in key})
    os.environ.pop("RAY_gcs_storage", None)
    os.environ.pop("RAY_gcs_storage_path", None)
    # tries again, because Ray gives itself 30 s, which a busy machine may exceed
    for _ in range(MOST_STARTS):
        try:
            ray.init(address="local", num_cpus=32, **NODE)
            break
        except Exception:
            ray.shutdown()
    ray_serve.start(http_options={"port": http_port})
    yield ray_serve
    ray_serve.shutdown()
    ray.shutdown()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_conversations_stay_where_their_prefix_is(serve: Any) -> None:
    async def talk() -> None:
        deployed = Deployed(serve, "talks")
        texts = {name: f"the system prompt of {name} " * 30 for name in "abc"}
        first = {name: await deployed.call(text) for name, text in texts.items()}
        assert len(set(first.values())) == 3
        for turn in range(3):
            for name in texts:
                texts[name] += f" turn {turn} " * 10
                assert await deployed.call(texts[name]) == first[name]
        await until_idle(deployed)

    run(talk())


def test_what_would_miss_its_slo_is_refused_over_handles_and_http(
    serve: Any, http_port: int
) -> None:
    from moonpool.ray.routing.router import CallRefusedError

    async def overload() -> None:
        deployed = Deployed(serve, "strict", ttft_s=0.06)
        calls = (deployed.call(f"{number} " * 100) for number in range(30))
        found = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in found if isinstance(each, CallRefusedError)]
        assert refused and len([each for each in found if isinstance(each, str)]) >= 3
        assert refused[-1].status_code == 429 and refused[-1].reason == "ttft_slo"
        # Sends a request that only the load keeps from its SLO; an idle replica may be too slow for
        # other requests.
        assert any(each.retry_after_s for each in refused)
        Deployed(serve, "stricter", ttft_s=1e-4)  # no replica can meet this SLO

    run(overload())
    url = f"http://127.0.0.1:{http_port}/stricter"
    deadline = time.monotonic() + WAIT_S
    while (answer := fresh.post(url, json={"prompt": "x"}, timeout=60)).status_code != 429:
        # tries again while Ray's proxy has not heard of the replica
        assert time.monotonic() < deadline
    assert "ttft_slo: " in answer.text


def test_a_lost_conductor_costs_no_call_and_comes_back(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def lose() -> None:
        deployed = Deployed(serve, "lossy")
        await deployed.call("before " * 50)
        life = (await deployed.described())["life"]
        pid = await deployed.conductor.__ray_call__.remote(lambda self: os.getpid())
        os.kill(pid, signal.SIGKILL)
        calls = (deployed.call(f"{number} afterwards " * 30) for number in range(12))
        assert len(await asyncio.gather(*calls)) == 12
        deadline = time.monotonic() + WAIT_S
        while "app='lossy') is back" not in caplog.text:
            assert time.monotonic() < deadline
            await deployed.call("again " * 50)
            await asyncio.sleep(0.2)
        assert "power of two choices places its calls until it is back" in caplog.text
        described = await deployed.described()
        assert described["life"] != life and len(described["replicas"]) == 3

    run(lose())


def test_a_client_that_leaves_and_a_replica_that_dies_leave_no_call_behind(serve: Any) -> None:
    async def leave() -> None:
        deployed = Deployed(serve, "leavers")
        stream = deployed.handle.options(stream=True, method_name="stream")
        answer = stream.remote({"prompt": "long " * 50, "max_tokens": 10_000})
        await answer.__anext__()
        assert (await deployed.described())["calls"] == 1
        answer.cancel()
        await until_idle(deployed)

    run(leave())


def test_a_deployment_that_changes_changes_its_conductor(serve: Any) -> None:
    from moonpool.ray.routing.router import CallRefusedError

    async def change() -> None:
        deployed = Deployed(serve, "changing")
        await deployed.call("before " * 50)
        life = (await deployed.described())["life"]
        deployed = Deployed(serve, "changing", ttft_s=1e-4)  # no replica can meet this SLO
        deadline = time.monotonic() + WAIT_S
        while (await deployed.described())["life"] == life:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        with pytest.raises(CallRefusedError):
            await deployed.call("after " * 50)

    run(change())


async def until_idle(deployed: Deployed) -> None:
    deadline = time.monotonic() + WAIT_S
    while (await deployed.described())["calls"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)

"""Tests `serve --vllm-endpoints ray://...` and `ray-serve://...` beside a real Ray with its
dashboard: named actors that keep servers, and replicas that Ray Serve gave ports."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from moonpool.discovery.endpoint import Listing, SourceError
from moonpool.discovery.source_text import parse_source
from moonpool.discovery.sources import open_source
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.ray_nodes import WAIT_S, TypedNode
from tests.live.test_discovery import EASY, PROMPT, complete, instances
from tests.live.vllm_stub import VllmStub, stubs, tokens_after

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

ACTORS = """
import sys, ray
ray.init(address="auto", namespace="llm", log_to_driver=False)

@ray.remote(num_cpus=0)
class Server:  # in place of one that starts `vllm serve` on its node
    def here(self):
        return True

kept = {}
for line in sys.stdin:
    what, name = line.split()
    if what == "start":
        kept[name] = Server.options(name=name).remote()
        ray.get(kept[name].here.remote())
    else:
        ray.kill(kept.pop(name))
    print("done", flush=True)
"""

REPLICAS = """
import time
from ray import serve
from starlette.requests import Request

@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
class Model:
    def __call__(self, request: Request) -> str:
        return "a replica"

serve.start(http_options={"host": "0.0.0.0"})  # else replicas listen at 127.0.0.1 alone
serve.run(Model.bind(), name="app")
print("done", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def ray_node() -> Iterator[TypedNode]:
    node = TypedNode("--num-cpus", "4")
    # set on the node, from which actors inherit it
    node.environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = "1"
    with node:
        yield node


@contextlib.contextmanager
def script(node: TypedNode, folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    file = folder / "script.py"
    file.write_text(text)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(file)], stdin=pipe, stdout=pipe, text=True, env=node.environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdin is not None
    process.stdin.write(words + "\n")
    process.stdin.flush()
    wait_done(process)


def wait_done(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "done":
            return
    raise AssertionError("the script has ended")


def wait_for(server: LocalServer, *names: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while instances(server) != set(names):
        assert time.monotonic() < deadline, (instances(server), names)
        time.sleep(0.1)


def test_actors_of_ray_join_and_are_drained(ray_node: TypedNode, tmp_path: Path) -> None:
    first, second = VllmStub("m"), VllmStub("m")
    # listens on all addresses, because Ray replaces 127.0.0.1 by the machine's own address
    first.host = second.host = ""
    source = f"ray://llm/vllm-*?api=http://127.0.0.1:{ray_node.dashboard_port}"
    with stubs(first, second), script(ray_node, tmp_path, ACTORS) as ray:
        tell(ray, f"start vllm-0:{first.port}")
        tell(ray, "start other")
        with LocalServer(["--vllm-endpoints", source, *EASY]) as server:
            wait_for(server, "vllm-0")
            assert complete(server) == tokens_after(PROMPT, 3)
            tell(ray, f"start vllm-1:{second.port}")
            wait_for(server, "vllm-0", "vllm-1")
            tell(ray, f"end vllm-0:{first.port}")
            wait_for(server, "vllm-1")
            assert complete(server) == tokens_after(PROMPT, 3)


def test_replicas_of_ray_serve_are_found_at_their_own_ports(
    ray_node: TypedNode, tmp_path: Path
) -> None:
    api = f"http://127.0.0.1:{ray_node.dashboard_port}"

    async def listing() -> Listing:
        heard: asyncio.Queue[Listing] = asyncio.Queue()
        source = open_source(parse_source(f"ray-serve://app?api={api}"))
        task = asyncio.create_task(source.follow(heard.put_nowait))
        try:
            async with asyncio.timeout(WAIT_S):
                while len((found := await heard.get()).endpoints) < 2:
                    pass
                return found
        finally:
            task.cancel()

    with pytest.raises(SourceError, match="Ray Serve does not run"):
        asyncio.run(open_source(parse_source(f"ray-serve://app?api={api}")).check())
    with script(ray_node, tmp_path, REPLICAS) as serves:
        wait_done(serves)
        found = asyncio.run(listing()).endpoints
        assert all(each.name.startswith("app-Model-") for each in found)
        for each in found:
            assert fresh.get(f"http://{each.address}/", timeout=WAIT_S).text == "a replica"

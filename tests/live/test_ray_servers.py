"""A cluster on Ray whose instances are servers of vLLM's kind, with a pool on each node; one with
attention workers; and one for which Ray's autoscaler adds machines.

`pip install '.[ray]'` lets these tests run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.routers.engines import STUB_MODEL
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.ray_nodes import (
    AutoscalingNodes,
    OnRay,
    RayNodes,
    processes_of,
)
from tests.live.test_faults import wait_until_gone
from tests.live.test_ray import NUM_STREAMS, stream_while
from tests.live.test_standby import Body
from tests.live.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

ROOT = Path(__file__).parents[2]
SERVER = (
    f"env PYTHONPATH={ROOT} {sys.executable} -m benchmarks.suite.routers.stub_server"
    f" --model {STUB_MODEL} --port {{port}} --events-port {{events_port}}"
)
POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    made = RayNodes(num_nodes=2)
    yield made
    made.shutdown()


def bodies(least: int, drawn: bool) -> list[Body]:
    """Of as many streams, with prompts of tokens from `least` on."""
    return [
        {
            "prompt": [least + number, least] * 50,
            "max_tokens": 300,
            "ignore_eos": True,
            "temperature": int(drawn),
            "seed": number,
        }
        for number in range(NUM_STREAMS)
    ]


def test_vllm_servers_and_their_pools_are_actors(nodes: RayNodes, tmp_path: Path) -> None:
    config = tmp_path / "vllm.toml"
    config.write_text(
        "[cluster]\nlauncher = 'ray'\nmixed = 2\nprefill = 0\ndecode = 0\n"
        "[engine]\nkind = 'vllm'\n"
        f"[ray]\nname = 'servers'\npool_bytes = {POOL_BYTES}\nvllm_command = '{SERVER}'\n"
    )
    served = OnRay(nodes, STUB_MODEL, "--config", str(config), "--port", "0")
    try:
        url = served.wait_until_up(2)[0]
        assert set(served.instances(url)) == {"mixed-0", "mixed-1"}
        asked = bodies(300, drawn=False)
        expected = stream_while(served, lambda url: None, asked, 2)
        assert all(len(text) > 100 for text in expected)

        def lose(words: str, its_actor: bool) -> None:
            """Loses one of two processes with these words, under streams."""

            def harm(url: str) -> None:
                pid = processes_of(nodes, words)[0]
                os.kill(served.actor_of(pid) if its_actor else pid, signal.SIGKILL)

            assert stream_while(served, harm, asked, 2) == expected, (words, its_actor)
            wait_until(lambda: len(processes_of(nodes, words)) == 2, f"no other {words}")
            wait_until(lambda: len(served.instances(url)) == 2, "its instance did not join again")

        for words, its_actor in product(("stub_server", "pool serve"), (False, True)):
            lose(words, its_actor)
        left = processes_of(nodes, "moonpool") + processes_of(nodes, "stub_server")
    finally:
        assert served.stop() == 0, served.log[-3000:]
    assert wait_until_gone(left) == []
    assert not list(Path(f"/dev/shm/moonpool-{os.getuid()}").glob("ray-servers-*"))


def test_attention_workers_are_actors(nodes: RayNodes, tmp_path: Path) -> None:
    config = tmp_path / "attention.toml"
    config.write_text("[ray]\nname = 'lamina'\n")
    counts = ["--prefill", "1", "--decode", "1", "--attention", "1", "--port", "0"]
    served = OnRay(nodes, MODEL, "--config", str(config), *counts, *SMALL)
    try:
        url = served.wait_until_up(2)[0]

        def workers() -> list[dict[str, Any]]:
            found = fresh.get(f"{url}/cluster", timeout=30).json()["attention"]
            return [worker for worker in found if worker["owner"] == "decode-0"]

        wait_until(lambda: len(workers()) == 1, "no attention worker has joined")
        asked = bodies(9, drawn=True)
        expected = stream_while(served, lambda url: None, asked, 2)
        lost = workers()[0]["pid"]
        kill = partial(os.kill, served.actor_of(lost), signal.SIGKILL)
        assert stream_while(served, lambda url: kill(), asked, 2) == expected
        wait_until(lambda: [w["pid"] for w in workers()] not in ([], [lost]), "it is not replaced")
        assert stream_while(served, lambda url: None, asked, 2) == expected
    finally:
        assert served.stop() == 0, served.log[-3000:]


def test_rays_autoscaler_adds_a_machine_for_what_the_conductor_wants(tmp_path: Path) -> None:
    """One CPU for the head and one instance of each role; what more is wanted needs a machine."""
    config = tmp_path / "grows.toml"
    config.write_text(
        "[conductor]\nautoscale = true\nautoscale_load = 0.05\n"
        "[ray]\nname = 'grows'\nmost_instances = 2\n"
    )
    with AutoscalingNodes(head_cpus=3, worker_cpus=1, most_workers=2) as nodes:
        served = OnRay(nodes, MODEL, "--config", str(config), "--port", "0", *SMALL)
        stop = threading.Event()
        try:
            url = served.wait_until_up(2)[0]
            assert nodes.num_alive() == 1
            for number in range(12):
                threading.Thread(target=_keep_busy, args=(url, number, stop), daemon=True).start()
            wait_until(lambda: len(served.instances(url)) > 2, served.log[-3000:])
            assert nodes.num_alive() > 1
        finally:
            stop.set()
            assert served.stop() == 0, served.log[-3000:]


def _keep_busy(url: str, number: int, stop: threading.Event) -> None:
    while not stop.is_set():
        body = {"prompt": [3 + number] * 200, "max_tokens": 300, "ignore_eos": True}
        fresh.post(f"{url}/v1/completions", json=body, timeout=120)

"""A cluster on Ray loses its processes, actors and nodes one after the other, but no answer.

Three raylets on this machine stand for three nodes. `pip install '.[ray]'` lets these tests run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.ray_nodes import OnRay, RayNodes, descendants_of, parent_of, processes_of
from tests.live.test_faults import wait_until_gone
from tests.live.test_standby import Body, LastingStream, whole
from tests.live.waiting import WAIT_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

NUM_STREAMS = 16
BODIES: list[Body] = [
    {
        "prompt": [3 + number] * 200,
        "max_tokens": 800,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
    }
    for number in range(NUM_STREAMS)
]
INSTANCES = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    made = RayNodes()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def served(nodes: RayNodes) -> Iterator[OnRay]:
    counts = ["--prefill", "2", "--decode", "2", "--port", "0"]
    made = OnRay(nodes, MODEL, *counts, *SMALL)
    made.wait_until_up(INSTANCES)
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def expected(served: OnRay) -> list[str]:
    url = served.wait_until_up(INSTANCES)[0]
    return [whole(url, body)[0] for body in BODIES]


def stream_while(served: OnRay, harm: Callable[[str], None]) -> list[str]:
    """Streams all bodies, and does harm when the slowest stream has some tokens. Returns the
    texts."""
    urls = served.wait_until_up(INSTANCES)
    streams = [LastingStream(urls, "/v1/completions", body) for body in BODIES]
    deadline = time.monotonic() + WAIT_S
    while min(len(stream.chunks) for stream in streams) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    harm(urls[0])
    for stream in streams:
        stream.thread.join()
    return [stream.text for stream in streams]


@pytest.mark.parametrize("name", ["decode-0", "prefill-1"])
@pytest.mark.parametrize("what", ["process", "actor"])
def test_a_lost_process_or_actor_cuts_no_stream(
    served: OnRay, expected: list[str], name: str, what: str
) -> None:
    def harm(url: str) -> None:
        pid = served.instances(url)[name]["pid"]
        os.kill(served.actor_of(pid) if what == "actor" else pid, signal.SIGKILL)

    assert stream_while(served, harm) == expected


def test_the_loss_of_rays_own_state_cuts_no_stream(
    served: OnRay, nodes: RayNodes, expected: list[str]
) -> None:
    assert stream_while(served, lambda url: nodes.restart_gcs()) == expected

    def harm(url: str) -> None:
        os.kill(served.actor_of(served.instances(url)["decode-1"]["pid"]), signal.SIGKILL)

    assert stream_while(served, harm) == expected  # harms again, after Ray has replaced the actors


def test_a_lost_head_is_replaced_by_its_standby_and_becomes_the_next_one(
    served: OnRay, expected: list[str]
) -> None:
    def harm(url: str) -> None:
        head = fresh.get(f"{url}/cluster", timeout=60).json()["head"]["pid"]
        # kills the actor of the pool's supervisor
        os.kill(parent_of(parent_of(head)), signal.SIGKILL)

    for _ in range(2):
        assert stream_while(served, harm) == expected


@pytest.mark.parametrize("whole_node", [False, True])
def test_a_lost_node_cuts_no_stream(
    served: OnRay, nodes: RayNodes, expected: list[str], whole_node: bool
) -> None:
    # all nodes, because a node may have no instance just now
    others = list(nodes.cluster.worker_nodes)
    lost = max(
        others, key=lambda node: (_has(nodes, node, "--role decode"), _has(nodes, node, "--role"))
    )
    kill = nodes.kill_node if whole_node else nodes.kill_raylet
    assert stream_while(served, lambda url: kill(lost)) == expected
    nodes.cluster.worker_nodes.discard(lost)
    nodes.add_node()


def test_the_end_of_the_command_leaves_nothing(
    served: OnRay, nodes: RayNodes, tmp_path: Path
) -> None:
    twin = OnRay(nodes, MODEL, "--port", "0", *SMALL)
    assert twin.process.wait(120) == 1
    assert "a cluster named 'moonpool' runs on this Ray" in twin.log.splitlines()[-1]
    config = tmp_path / "second.toml"
    config.write_text("[ray]\nname = 'second'\n")
    before = set(processes_of(nodes, "moonpool"))
    for sign in (signal.SIGTERM, signal.SIGKILL):
        second = OnRay(nodes, MODEL, "--config", str(config), "--port", "0", *SMALL)
        second.wait_until_up(2)
        pids = [pid for pid in processes_of(nodes, "moonpool") if pid not in before]
        assert len(pids) >= 6  # at least two heads with a supervisor each, and two workers
        second.stop(sign)
        assert wait_until_gone(pids) == []
    assert served.instances(served.wait_until_up(INSTANCES)[0])  # the first cluster still serves


def _has(nodes: RayNodes, node: object, words: str) -> bool:
    own = descendants_of(nodes.raylet_of(node))
    return any(pid in own for pid in processes_of(nodes, words))

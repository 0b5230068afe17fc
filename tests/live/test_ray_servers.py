"""Runs clusters on Ray: of servers of vLLM's kind with a pool on each node, and with attention
workers, which both lose actors under 16 streams; and one for which Ray's autoscaler adds machines.

`pip install '.[ray]'` lets these tests run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.suite.routers.engines import STUB_MODEL
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.ray_nodes import (
    AutoscalingNodes,
    OnRay,
    RayNodes,
    descendants_of,
    kill_all,
    parent_of,
    processes_of,
)
from tests.live.test_faults import wait_until_gone
from tests.live.test_standby import Body, CutStream, whole
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


def line_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def servers_of(nodes: RayNodes) -> list[int]:
    """Returns the servers, without the processes that wait for their ends."""
    waiting = processes_of(nodes, "moonpool.ray.child")
    return [pid for pid in processes_of(nodes, "stub_server") if pid not in waiting]


def ask(url: str, number: int, max_tokens: int = 8) -> list[int]:
    body = {
        "prompt": [300 + number] * 100,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = fresh.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


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
        answers = [ask(url, number) for number in range(4)]
        servers = servers_of(nodes)
        pools = [pid for pid in processes_of(nodes, "pool serve") if pid not in servers]
        assert len(servers) == 2 and len(pools) == 2
        os.kill(servers[0], signal.SIGKILL)
        wait_until(lambda: len(servers_of(nodes)) == 2, "no other server")
        wait_until(lambda: len(served.instances(url)) == 2, "its instance did not join again")
        os.kill(pools[0], signal.SIGKILL)
        wait_until(lambda: len(processes_of(nodes, "pool serve")) == 2, "no other pool")
        assert [ask(url, number) for number in range(4)] == answers
        left = processes_of(nodes, "moonpool") + processes_of(nodes, "stub_server")
    finally:
        assert served.stop() == 0, served.log[-3000:]
    assert wait_until_gone(left) == []
    assert not list(Path(f"/dev/shm/moonpool-{os.getuid()}").glob("ray-servers-*"))


def test_pools_leave_no_memory_though_the_heads_are_stuck(nodes: RayNodes, tmp_path: Path) -> None:
    config = tmp_path / "stuck.toml"
    config.write_text(
        "[cluster]\nlauncher = 'ray'\nmixed = 1\nprefill = 0\ndecode = 0\n"
        "[engine]\nkind = 'vllm'\n[api]\ndrain_seconds = 0.0\n"
        f"[ray]\nname = 'stuck'\npool_bytes = {POOL_BYTES}\nvllm_command = '{SERVER}'\n"
    )
    served = OnRay(nodes, STUB_MODEL, "--config", str(config), "--port", "0")
    try:
        url = served.wait_until_up(1)[0]
        words = [line_of(pid) for pid in processes_of(nodes, "--memory-folder")]
        folders = [Path(line[line.index("--memory-folder") + 1]) for line in words]
        # writes a file into each folder, as if a vLLM had stored blocks there
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / "blocks").write_bytes(b"blocks")
        head = fresh.get(f"{url}/cluster", timeout=60).json()["head"]["pid"]
        # stops the actor, which answers no more
        os.kill(parent_of(parent_of(head)), signal.SIGSTOP)
        left = processes_of(nodes, "moonpool") + processes_of(nodes, "stub_server")
    finally:
        assert served.stop() == 0, served.log[-3000:]
    assert folders and not [folder for folder in folders if folder.exists()]
    kill_all(wait_until_gone(left, wait_s=10))


@contextmanager
def served_by_vllms(nodes: RayNodes, tmp_path: Path) -> Iterator[OnRay]:
    """Serves by two servers that compute: moonpools, which speak the needed part of vLLM's HTTP."""
    words = ["serve", MODEL, "--mixed", "1", *SMALL, "--admission", "none", "--slo-ttft", "600"]
    line = " ".join([sys.executable, "-m", "moonpool", *words, "--port", "{port}"])
    config = tmp_path / "computing.toml"
    config.write_text(
        "[cluster]\nlauncher = 'ray'\nmixed = 2\nprefill = 0\ndecode = 0\n"
        "[engine]\nkind = 'vllm'\n"
        f"[ray]\nname = 'computing'\npool_bytes = {POOL_BYTES}\nvllm_command = '{line}'\n"
    )
    with ended(OnRay(nodes, MODEL, "--config", str(config), "--port", "0")) as served:
        yield served


@contextmanager
def served_with_attention(nodes: RayNodes, tmp_path: Path) -> Iterator[OnRay]:
    config = tmp_path / "attention.toml"
    config.write_text("[ray]\nname = 'lamina'\n")
    counts = ["--prefill", "1", "--decode", "1", "--attention", "2", "--port", "0"]
    with ended(OnRay(nodes, MODEL, "--config", str(config), *counts, *SMALL)) as served:
        yield served


@contextmanager
def ended(served: OnRay) -> Iterator[OnRay]:
    """Ends the cluster after the `with` block. The end must be orderly."""
    try:
        yield served
    finally:
        assert served.stop() == 0, served.log[-3000:]


BODIES: list[Body] = [
    {
        "prompt": [3 + number] * 100,
        "max_tokens": 350,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
    }
    for number in range(16)
]
# What is drawn at another vLLM is drawn with another seed.
GREEDY = [body | {"temperature": 0} for body in BODIES]


def stream_while(url: str, bodies: list[Body], lost: int) -> list[str]:
    """Streams all bodies, and kills an actor when each stream has some text. Returns the texts. No
    stream may be cut: these clients do not come back."""
    streams = [CutStream(url, body) for body in bodies]
    wait_until(lambda: all(len(stream.text) > 5 for stream in streams), "no text")
    os.kill(lost, signal.SIGKILL)
    for stream in streams:
        stream.thread.join()
    assert not [number for number, stream in enumerate(streams) if stream.is_cut]
    return [stream.text for stream in streams]


def test_a_lost_actor_of_a_vllm_or_of_a_pool_cuts_no_stream(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with served_by_vllms(nodes, tmp_path) as served:
        url = served.wait_until_up(2)[0]
        expected = [whole(url, body)[0] for body in GREEDY]

        def instance() -> int:
            return int(served.instances(url).get("mixed-0", {}).get("pid", 0))

        def pools() -> list[int]:
            return processes_of(nodes, "pool serve --dram")

        for lost in (instance(), pools()[0]):
            actor = parent_of(lost)
            below = descendants_of(actor)  # includes the processes of a vLLM
            assert stream_while(url, GREEDY, actor) == expected
            assert wait_until_gone(below) == []
            wait_until(lambda: instance() and len(pools()) == 2, "none has taken its place")


def test_a_lost_actor_of_an_attention_worker_cuts_no_stream(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with served_with_attention(nodes, tmp_path) as served:
        url = served.wait_until_up(2)[0]

        def workers() -> set[int]:
            found = fresh.get(f"{url}/cluster", timeout=120).json()["attention"]
            return {each["pid"] for each in found if each["owner"] == "decode-0"}

        wait_until(lambda: len(workers()) == 2, "no two attention workers have joined")
        expected = [whole(url, body)[0] for body in BODIES]
        lost = min(workers())
        assert stream_while(url, BODIES, parent_of(lost)) == expected
        wait_until(lambda: len(workers() - {lost}) == 2, "it is not replaced")


def test_rays_autoscaler_adds_a_machine_for_what_the_conductor_wants(tmp_path: Path) -> None:
    """Has one CPU for the head and one instance of each role; more instances need another
    machine."""
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

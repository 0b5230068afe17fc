"""A cluster on Ray gets and shows the resources that it asks for: GPUs, memory and SSDs in
placement groups, names in `ray list`, and a cluster as a job of Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.ray_nodes import WAIT_S, OnRay, RayNodes, TypedNode
from tests.live.test_faults import wait_until_gone

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

MEMORY = 600 << 20
BODY = {"prompt": [9, 8] * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    made = RayNodes(num_nodes=1)
    yield made
    made.shutdown()


def config_of(tmp_path: Path, more: str) -> str:
    file = tmp_path / "moonpool.toml"
    file.write_text(
        "[cluster]\nlauncher = 'ray'\n[engine]\ndevice = 'cpu'\n"
        f"[pool]\nssd_folder = '{tmp_path}'\nssd_tokens_per_instance = 256\n"
        f"[ray]\nname = 'asked'\ncpus = 1\n{more}"
    )
    return str(file)


def test_instances_are_where_gpus_memory_and_ssds_are(nodes: RayNodes, tmp_path: Path) -> None:
    """Declares devices that the machine does not have: the test checks which process gets which
    device."""
    has_all = nodes.add_node(num_gpus=2, memory=2 * MEMORY, resources={"ssd": 2})
    more = f"gpus = 1\nmemory_bytes = {MEMORY}\nssd_resource = 'ssd'\n"
    config = config_of(tmp_path, more)
    served = OnRay(nodes, MODEL, "--config", config, "--port", "0", *SMALL)
    try:
        url = served.wait_until_up(2)[0]
        pids = {name: each["pid"] for name, each in served.instances(url).items()}
        assert set(pids) == {"prefill-0", "decode-0"}
        for pid in pids.values():
            assert nodes.node_of(pid) is has_all
        devices = [environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in pids.values()]
        assert sorted(devices) == ["0", "1"]
        groups = placement_groups(nodes)
        assert groups["asked/head"] == [{"CPU": 1.0}] * 2
        each = {"CPU": 1.0, "GPU": 1.0, "memory": float(MEMORY), "ssd": 1.0}
        assert groups["asked/prefill"] == groups["asked/decode"] == [each]
        assert fresh.post(f"{url}/v1/completions", json=BODY, timeout=120).status_code == 200
    finally:
        assert served.stop() == 0, served.log[-3000:]


def test_what_no_node_has_is_waited_for_and_said(nodes: RayNodes, tmp_path: Path) -> None:
    config = config_of(tmp_path, "gpus = 1\nssd_resource = 'ssd'\n")
    served = OnRay(nodes, MODEL, "--config", config, "--port", "0", *SMALL)
    try:
        deadline = time.monotonic() + WAIT_S
        while "waiting for room in Ray for" not in served.log:
            assert served.process.poll() is None, served.log[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        line = next(line for line in served.log.splitlines() if "waiting for room" in line)
        assert "'GPU': 1.0" in line and "'ssd': 1.0" in line
        nodes.add_node(num_gpus=2, resources={"ssd": 2})
        served.wait_until_up(2)
    finally:
        assert served.stop() == 0, served.log[-3000:]


def test_an_address_without_a_ray_is_one_line_at_once() -> None:
    """No other Ray is used instead, and none is started."""
    address = f"127.0.0.1:{free_port()}"
    line = [sys.executable, "-m", "moonpool", "serve", MODEL, "--launcher", "ray"]
    plain = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for words, named in ((["--ray-address", address], {}), ([], {"RAY_ADDRESS": address})):
        done = subprocess.run(
            [*line, *words], env=plain | named, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        (said,) = done.stderr.splitlines()
        assert f"no Ray runs at {address}: Connection refused" in said


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def placement_groups(nodes: RayNodes) -> dict[str, list[dict[str, float]]]:
    """Returns the bundles of each placed process, by its name."""
    import ray
    from ray.util import placement_group_table

    ray.init(nodes.address, logging_level="ERROR", log_to_driver=False)
    try:
        found: dict[str, Any] = placement_group_table()
        return {
            each["name"]: [each["bundles"][number] for number in sorted(each["bundles"])]
            for each in found.values()
            if each["state"] == "CREATED"
        }
    finally:
        ray.shutdown()


def test_a_job_of_ray_serves_and_shows_what_is_what(tmp_path: Path) -> None:
    """Runs `ray job submit -- moonpool serve ... --launcher ray`, and returns what `ray` then
    prints."""
    resources = ["--num-cpus=6", "--num-gpus=2", '--resources={"ssd": 2}']
    config = config_of(tmp_path, "gpus = 1\nssd_resource = 'ssd'\n")
    line = [sys.executable, "-m", "moonpool", "serve", MODEL, "--config", config]
    line += ["--launcher", "ray", "--port", "0", *SMALL]
    with TypedNode(*resources) as node:
        node.type("job", "submit", "--no-wait", "--submission-id", "llm", "--", *line)
        url = serving_url(node)
        assert fresh.post(f"{url}/v1/completions", json=BODY, timeout=120).status_code == 200
        pids = [each["pid"] for each in fresh.get(f"{url}/cluster", timeout=60).json()["instances"]]

        status = node.type("status")
        assert "2.0/2.0 GPU" in status and "2.0/2.0 ssd" in status
        actors = node.type("list", "actors", "--filter", "ray_namespace=asked")
        for name, kind in (
            ("head-0", "HeadActor"),
            ("prefill-0", "WorkerActor"),
            ("decode-0", "WorkerActor"),
        ):
            assert re.search(rf"{kind}\s+ALIVE.*asked/{name}\b", actors), actors
        groups = node.type("list", "placement-groups")
        for name in ("head", "prefill", "decode"):
            assert re.search(rf"asked/{name}\b.*CREATED", groups), groups

        node.type("job", "stop", "llm")
        assert wait_until_gone(pids) == []
        deadline = time.monotonic() + WAIT_S
        while "2.0/2.0 GPU" in (status := node.type("status")):
            assert time.monotonic() < deadline, status


def serving_url(node: TypedNode) -> str:
    """Waits until the job says where it serves, and both instances run."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        log = node.type("job", "logs", "llm")
        found = re.search(r"serving at (\S+?)(?:,| \(Ctrl)", log)
        if found:
            with_instances = fresh.get(f"{found[1]}/cluster", timeout=60)
            if len(with_instances.json().get("instances", ())) == 2:
                return found[1]
        time.sleep(1)
    raise AssertionError(log[-4000:])

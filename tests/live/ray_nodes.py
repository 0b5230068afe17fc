"""A Ray cluster of several raylets on this machine, and a moonpool on it. Needs the extra `ray`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.live.calls import fresh
from tests.live.test_faults import command_of, wait_until_gone

WAIT_S = 180.0
MOST_STARTS = 5
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_gcs_storage": "rocksdb",  # its state outlives it, as in a cluster that shall last
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # the machine may be busy
}
NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}


class RayNodes:
    """`cluster` is Ray's own harness. `shutdown` ends every process."""

    def __init__(self, num_nodes: int = 3, cpus: int = 4, **resources: float) -> None:
        from ray.cluster_utils import Cluster

        self._folder = tempfile.TemporaryDirectory()
        os.environ.update(SETTINGS | {"RAY_gcs_storage_path": self._folder.name})
        self._node = {**NODE, "num_cpus": cpus, "resources": resources}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=self._node)
        for _ in range(num_nodes - 1):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self) -> Any:
        for _ in range(MOST_STARTS):  # Ray gives a raylet 30 s, which a busy machine may exceed
            with contextlib.suppress(Exception):
                return self.cluster.add_node(**self._node)
        raise AssertionError("Ray cannot start a raylet")

    def raylet_of(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def kill_raylet(self, node: Any) -> None:
        os.kill(self.raylet_of(node), signal.SIGKILL)

    def kill_node(self, node: Any) -> None:
        """The machine is gone: the raylet and all that descends from it, at once."""
        pids = [self.raylet_of(node), *descendants_of(self.raylet_of(node))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids[1:])

    def restart_gcs(self) -> None:
        """The process that knows the cluster dies, and is started again with what it has stored."""
        self.cluster.head_node.kill_gcs_server()
        time.sleep(2)
        self.cluster.head_node.start_gcs_server()

    def node_of(self, pid: int) -> Any:
        """The node on which a process of an actor runs."""
        for node in [self.cluster.head_node, *self.cluster.worker_nodes]:
            if pid in descendants_of(self.raylet_of(node)):
                return node
        raise AssertionError(f"no node has process {pid}")

    def shutdown(self) -> None:
        self.cluster.shutdown()
        self._folder.cleanup()


class OnRay:
    """`moonpool serve --launcher ray`, as a person types it."""

    def __init__(self, nodes: RayNodes, *arguments: str) -> None:
        self.nodes = nodes
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - lives as long
        line = ["serve", *arguments, "--launcher", "ray", "--ray-address", nodes.address]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", *line], stdout=self._log, stderr=self._log
        )

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait_until_up(self, num_instances: int) -> list[str]:
        """Returns the addresses of both heads, that of the one which leads first."""
        pattern = r"serving at (\S+), and after a loss at (\S+) \(Ctrl"
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log[-4000:]
            lines = [line for line in self.log.splitlines() if "launcher INFO serving at" in line]
            found = re.search(pattern, lines[-1]) if lines else None
            if found and len(self.instances(found[1])) >= num_instances:
                return list(found.groups())
            time.sleep(0.2)
        raise AssertionError(self.log[-4000:])

    def instances(self, url: str) -> dict[str, dict[str, Any]]:
        """What the head says of its instances, by name; empty while it does not answer."""
        try:
            cluster = fresh.get(f"{url}/cluster", timeout=10).json()
        except httpx.HTTPError:
            return {}
        return {i["instance_id"]: i for i in cluster.get("instances", [])}

    def wait_for(self, url: str, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.instances(url)) < count:
            assert time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.2)

    def actor_of(self, pid: int) -> int:
        """The actor that keeps this process."""
        return parent_of(pid)

    def stop(self, sign: int = signal.SIGINT) -> int:
        self.process.send_signal(sign)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self._log.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants_of(pid: int) -> list[int]:
    """All processes that descend from this one, found in one look."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:  # grows
        found += children.get(each, ())
    return found


def processes_of(nodes: RayNodes, words: str) -> list[int]:
    """The processes below any raylet whose command line has these words."""
    raylets = [nodes.raylet_of(n) for n in [nodes.cluster.head_node, *nodes.cluster.worker_nodes]]
    pids = [pid for raylet in raylets for pid in descendants_of(raylet)]
    return [pid for pid in pids if words in command_of(pid)]

"""Runs a Ray cluster of several raylets on this machine, and a moonpool on it. Needs the extra
`ray`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.test_faults import command_of, wait_until_gone

WAIT_S = 180.0
MOST_STARTS = 5
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # keeps Ray's state on disk, so that it outlives the process, as in a cluster that lasts
    "RAY_gcs_storage": "rocksdb",
    "RAY_DEDUP_LOGS": "0",
    "RAY_raylet_start_wait_time_s": "120",
    # longer than the default, because the machine may be busy
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}
AGENT_PORTS = ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent")
OPTIONS = ("dashboard-agent-grpc", "metrics-export", "dashboard-agent-listen", "runtime-env-agent")


def agent_ports() -> dict[str, int]:
    """Holds ports for the agents of one node, by Ray's names. A raylet that learns the ports from
    its agents ends if an agent takes more than 15 s to start, as on a busy machine."""
    return {f"{name}_port": free_port() for name in AGENT_PORTS}


def agent_options() -> list[str]:
    """Returns the same ports as flags of `ray start`."""
    ports = agent_ports().values()
    return [f"--{name}-port={port}" for name, port in zip(OPTIONS, ports, strict=True)]


class RayletEndedError(Exception):
    """Is raised if Ray has ended the node that it was starting."""


class RayNodes:
    """`cluster` is Ray's own harness. `shutdown` ends every process."""

    def __init__(self, num_nodes: int = 3, cpus: int = 4, **resources: float) -> None:
        from ray.cluster_utils import Cluster

        self._folder = tempfile.TemporaryDirectory()
        os.environ.update(SETTINGS)
        self._node = {**NODE, "num_cpus": cpus, "resources": resources}
        self.cluster: Any = Cluster()
        for _ in range(num_nodes):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self, **more: Any) -> Any:
        """`more`: settings of this node that add to or replace the common settings."""
        # tries again, because Ray gives a raylet 30 s, which a busy machine may exceed
        for _ in range(MOST_STARTS):
            # The node that starts now becomes the head node, with state of its own.
            if self.cluster.head_node is None:
                store = tempfile.mkdtemp(dir=self._folder.name)
                os.environ.update({"RAY_gcs_storage_path": store})
            before = descendants_of(os.getpid())
            try:
                return self.cluster.add_node(**self._node | agent_ports() | more)
            # Ray does not end the processes of the node that it has started already.
            except Exception:
                kill_all(set(descendants_of(os.getpid())).difference(before))
        raise AssertionError("Ray cannot start a raylet")

    def raylet_of(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def kill_raylet(self, node: Any) -> None:
        """Reaps the killed process. Its actors end when no process has its pid, so the process must
        not stay a zombie."""
        os.kill(self.raylet_of(node), signal.SIGKILL)
        node.all_processes["raylet"][0].process.wait()

    def kill_node(self, node: Any) -> None:
        """Kills a machine: the raylet and all its descendants end at the same moment."""
        pids = [self.raylet_of(node), *descendants_of(self.raylet_of(node))]
        kill_all(pids)
        node.all_processes["raylet"][0].process.wait()
        wait_until_gone(pids[1:])

    def restart_gcs(self) -> None:
        """Kills the process that knows the cluster and starts it again from its stored state."""
        self.cluster.head_node.kill_gcs_server()
        time.sleep(2)
        self.cluster.head_node.start_gcs_server()

    def node_of(self, pid: int) -> Any:
        """Returns the node on which a process of an actor runs."""
        for node in [self.cluster.head_node, *self.cluster.worker_nodes]:
            if pid in descendants_of(self.raylet_of(node)):
                return node
        raise AssertionError(f"no node has process {pid}")

    def shutdown(self) -> None:
        self.cluster.shutdown()
        self._folder.cleanup()


class AutoscalingNodes:
    """Runs a Ray cluster whose autoscaler starts raylets on this machine in place of machines. Ends
    all raylets after the `with` block."""

    def __init__(self, head_cpus: int, worker_cpus: int, most_workers: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        kind = {"node_config": {}, "min_workers": 0, "max_workers": most_workers}
        # Ray's own harness `AutoscalingCluster` would end every Ray of this machine.
        self._config = {
            "cluster_name": "fake_multinode",
            "max_workers": most_workers,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "gcs_address": self.address,
            },
            "available_node_types": {
                "ray.head.default": kind | {"resources": {"CPU": head_cpus}, "max_workers": 0},
                "machine": kind | {"resources": {"CPU": worker_cpus}},
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.5,
            "auth": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
        }
        self._head_cpus = head_cpus
        self._folder = tempfile.TemporaryDirectory(prefix="ray")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AutoscalingNodes:
        file = Path(self._folder.name) / "autoscaling.json"
        file.write_text(json.dumps(self._config))
        line = ["start", "--head", "--block", "--port", self.address.rpartition(":")[2]]
        line += [f"--autoscaling-config={file}", f"--num-cpus={self._head_cpus}"]
        line += ["--include-dashboard=false", "--object-store-memory=80000000"]
        line += ["--node-ip-address=127.0.0.1", *agent_options()]
        environment = {**os.environ, **SETTINGS, "RAY_FAKE_CLUSTER": "1"}
        environment |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        environment["RAY_gcs_storage_path"] = self._folder.name
        log = (Path(self._folder.name) / "log").open("wb")
        self._process = subprocess.Popen(
            [*ray_program(), *line], stdout=log, stderr=log, env=environment
        )
        _wait_until_up(self, self._process, lambda: self.num_alive() > 0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        kill_all([self._process.pid, *descendants_of(self._process.pid)])
        self._process.wait()
        self._folder.cleanup()

    def num_alive(self) -> int:
        """Returns the number of raylets that Ray knows as alive, or 0 while Ray does not answer."""
        code = (
            f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level='ERROR');"
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=WAIT_S)
        words = done.stdout.split()
        return int(words[-1]) if done.returncode == 0 and words else 0

    def log(self) -> str:
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-4000:]


class TypedNode:
    """Runs a Ray of one node with its dashboard, started by `ray start --head` as a person types
    it. Ends Ray after the `with` block."""

    def __init__(self, *words: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.dashboard_port = free_port()
        self._words = words
        self._had_raylet = False
        self._folder = tempfile.TemporaryDirectory(prefix="ray")
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = {**os.environ, **SETTINGS, "RAY_ADDRESS": self.address}
        self.environment["RAY_gcs_storage_path"] = self._folder.name
        self.environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{self.dashboard_port}"

    def __enter__(self) -> TypedNode:
        """Starts the node again if the raylet ends, as when its agents take more than 15 s to
        start."""
        for _ in range(MOST_STARTS):
            self._process = self._begin()
            try:
                _wait_until_up(self, self._process, self._has_node)
                return self
            except RayletEndedError:
                self._end()
        raise AssertionError(self.log())

    def _begin(self) -> subprocess.Popen[bytes]:
        self._had_raylet = False
        line = ["start", "--head", "--block", "--port", self.address.rpartition(":")[2]]
        line += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        line += ["--dashboard-port", str(self.dashboard_port), *agent_options(), *self._words]
        store = tempfile.mkdtemp(dir=self._folder.name)
        environment = self.environment | {"RAY_gcs_storage_path": store}
        del environment["RAY_ADDRESS"]
        log = (Path(self._folder.name) / "log").open("wb")
        return subprocess.Popen([*ray_program(), *line], stdout=log, stderr=log, env=environment)

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        assert self._process is not None
        kill_all([self._process.pid, *descendants_of(self._process.pid)])
        self._process.wait()

    def type(self, *words: str) -> str:
        """Returns what `ray WORDS` prints."""
        done = subprocess.run(
            [*ray_program(), *words], capture_output=True, env=self.environment, timeout=WAIT_S
        )
        printed = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, printed[-4000:]
        return printed

    def _has_node(self) -> bool:
        """Waits until the dashboard answers and lists the node as alive. Raises
        RayletEndedError."""
        assert self._process is not None
        has_raylet = any(is_raylet(pid) for pid in descendants_of(self._process.pid))
        if self._had_raylet and not has_raylet:
            raise RayletEndedError
        self._had_raylet = has_raylet
        with contextlib.suppress(httpx.HTTPError, ValueError):
            where = f"http://127.0.0.1:{self.dashboard_port}"
            if fresh.get(f"{where}/api/jobs/", timeout=10).is_success:
                told = fresh.get(f"{where}/nodes?view=summary", timeout=10).json()["data"][
                    "summary"
                ]
                return any(node["raylet"].get("state") == "ALIVE" for node in told)
        return False

    def log(self) -> str:
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-4000:]


def _wait_until_up(
    node: AutoscalingNodes | TypedNode, process: subprocess.Popen[bytes], is_up: Callable[[], bool]
) -> None:
    """Ends all started processes if the server does not come up."""
    deadline = time.monotonic() + WAIT_S
    try:
        while not is_up():
            assert process.poll() is None, node.log()
            assert time.monotonic() < deadline, node.log()
            time.sleep(1)
    except RayletEndedError:
        raise
    except BaseException:
        node.__exit__()
        raise


def ray_program() -> list[str]:
    beside = Path(sys.executable).with_name("ray")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "ray.scripts.scripts"]


class OnRay:
    """Runs `moonpool serve --launcher ray`, as a person types it."""

    def __init__(self, nodes: RayNodes | AutoscalingNodes, *arguments: str) -> None:
        self.nodes = nodes
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - lives as long
        self._last_log = ""
        line = ["serve", *arguments, "--launcher", "ray", "--ray-address", nodes.address]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", *line], stdout=self._log, stderr=self._log
        )

    @property
    def log(self) -> str:
        if self._log.closed:
            return self._last_log
        return Path(self._log.name).read_text(errors="replace")

    def wait_until_up(self, num_instances: int) -> list[str]:
        """Returns the addresses of both heads. The leading head comes first."""
        pattern = r"serving at (\S+?)(?:, and after a loss at (\S+))? \(Ctrl"
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log[-4000:]
            lines = [line for line in self.log.splitlines() if "launcher INFO serving at" in line]
            found = re.search(pattern, lines[-1]) if lines else None
            if found and len(self.instances(found[1])) >= num_instances:
                return [url for url in found.groups() if url]
            time.sleep(0.2)
        raise AssertionError(self.log[-4000:])

    def instances(self, url: str) -> dict[str, dict[str, Any]]:
        """Returns the head's description of its instances, by name, or nothing while the head does
        not answer."""
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
        """Returns the actor that keeps this process."""
        return parent_of(pid)

    def stop(self, sign: int = signal.SIGINT) -> int:
        self.process.send_signal(sign)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self._last_log = self.log
            self._log.close()


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_raylet(pid: int) -> bool:
    """Whether the process still runs: Ray learns late that a process has ended."""
    with contextlib.suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return name.endswith("(raylet") and not rest.startswith(" Z")
    return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants_of(pid: int) -> list[int]:
    """Returns all descendants of this process, found in one look."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:  # grows
        found += children.get(each, ())
    return found


def processes_of(nodes: RayNodes, words: str) -> list[int]:
    """Returns the processes below any raylet whose command line has these words."""
    raylets = [nodes.raylet_of(n) for n in [nodes.cluster.head_node, *nodes.cluster.worker_nodes]]
    found = []
    for pid in [pid for raylet in raylets for pid in descendants_of(raylet)]:
        with contextlib.suppress(OSError):  # fails if the process has just ended
            if words in command_of(pid):
                found.append(pid)
    return found

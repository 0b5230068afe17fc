"""Starts the pods of rendered objects as processes of this machine, as a kubelet would.

The module follows each container's command, arguments with their variables, environment, mounted
ConfigMaps and Secrets, probes, order of start and end, and time to end. Folders and ports belong to
the test. A Service's name becomes the address of a container that it selects.
"""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from tests.deploy.chart import NAMESPACE, Manifest, of_kind, selects, workloads
from tests.forked.commands import ForkedCommand

HERE = Path(__file__).parent
STUB = HERE / "vllm_server.py"
START_S = 300.0
_VARIABLE = re.compile(r"\$\((\w+)\)")


@dataclass
class Container:
    pod: Pod
    spec: Manifest
    process: Any = None
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    @property
    def name(self) -> str:
        return f"{self.pod.name}/{self.spec['name']}"

    @property
    def stays_beside(self) -> bool:
        """Whether this is an init container that keeps running. Such a container ends after the
        others."""
        return self.spec.get("restartPolicy") == "Always"

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


@dataclass
class Pod:
    name: str
    labels: dict[str, str]
    spec: Manifest
    folder: Path
    # the port here of each port of a container, by name and by number
    ports: dict[str, int] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in [*self.spec.get("initContainers", ()), *self.spec["containers"]]:
            self.containers.append(Container(self, each))
            for port in each.get("ports", ()):
                number = quiet_port()
                self.ports[port["name"]] = self.ports[str(port["containerPort"])] = number


class Loopback:
    """Runs pods: `start` starts all pods and waits until they are ready; `stop` ends them like a
    kubelet."""

    def __init__(
        self, manifests: list[Manifest], folder: Path, secrets: dict[str, dict[str, bytes]]
    ) -> None:
        """`secrets` are the Secrets that exist already."""
        self._folder = folder
        self._configs = {each["metadata"]["name"]: each for each in of_kind(manifests, "ConfigMap")}
        self._secrets = dict(secrets)
        for each in of_kind(manifests, "Secret"):
            data = {key: base64.b64decode(text) for key, text in each["data"].items()}
            self._secrets[each["metadata"]["name"]] = data
        self.services = of_kind(manifests, "Service")
        self.pods: list[Pod] = []
        for workload in workloads(manifests):
            template = workload["spec"]["template"]
            for number in range(workload["spec"].get("replicas", 1)):
                name = f"{workload['metadata']['name']}-{number}"
                pod = Pod(name, template["metadata"]["labels"], template["spec"], folder / name)
                self.pods.append(pod)

    def secret(self, name: str, key: str) -> bytes:
        return self._secrets[name][key]

    def port_of(self, service: str, port: int) -> int:
        """Returns the port on loopback of a pod that the Service selects."""
        (found,) = [one for one in self.services if one["metadata"]["name"] == service]
        (target,) = [one["targetPort"] for one in found["spec"]["ports"] if one["port"] == port]
        pods = [pod for pod in self.pods if selects(found["spec"]["selector"], pod.labels)]
        assert pods, f"{service} selects no pod"
        return pods[0].ports[str(target)]

    # Start:

    def start(self, but: Callable[[Container], bool] = lambda _: False) -> None:
        """Starts all containers except `but`, and waits until each is ready."""
        waiting: list[Container] = []
        for pod in self.pods:
            for container in pod.containers:
                if but(container):
                    continue
                self._run(container)
                if container.stays_beside:
                    self._probe(container, "startupProbe")
                waiting.append(container)
        for pod in {id(each.pod): each.pod for each in waiting}.values():
            self.wait_until_ready(pod)

    def wait_until_ready(self, pod: Pod) -> None:
        for container in pod.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if container.process is not None:
                    self._probe(container, probe)

    def _run(self, container: Container) -> None:
        places = self._places(container)
        environment = self._environment(container)
        line = [
            self._local(container.pod, _VARIABLE.sub(lambda m: environment[m[1]], word), places)
            for word in [*container.spec["command"], *container.spec.get("args", ())]
        ]
        environment = {key: self._local(None, text, places) for key, text in environment.items()}
        log = container.log.fileno()
        if line[0] == "moonpool":
            container.process = ForkedCommand(line[1:], log, log, os.environ | environment)
            return
        assert line[0] == "vllm", line
        real = os.environ.get("MOONPOOL_TEST_VLLM")
        words = [real, *line[1:]] if real else [sys.executable, str(STUB), *line[1:]]
        container.process = subprocess.Popen(
            words, stdout=log, stderr=log, env=os.environ | environment, cwd=HERE.parents[1]
        )

    def _environment(self, container: Container) -> dict[str, str]:
        fields = {
            "metadata.name": container.pod.name,
            "metadata.namespace": NAMESPACE,
            "status.podIP": "127.0.0.1",
        }
        found = {}
        for each in container.spec.get("env", ()):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                found[each["name"]] = self.secret(ref["name"], ref["key"]).decode()
            else:
                found[each["name"]] = each["value"]
        return found

    def _places(self, container: Container) -> dict[str, Path]:
        """Makes the container's volumes. Returns the folder or file at each mount path."""
        volumes = {each["name"]: each for each in container.pod.spec.get("volumes", ())}
        found: dict[str, Path] = {}
        for mount in container.spec.get("volumeMounts", ()):
            name = mount["name"]
            folder = container.pod.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(name, {})  # empty if the volume is a claim of a StatefulSet
            found[mount["mountPath"]] = folder / mount.get("subPath", "")
            for key, data in self._files(volume).items():
                (folder / key).write_bytes(data)
        for path in found.values():
            for file in [path] if path.is_file() else path.glob("*.toml"):
                file.write_text(self._local(None, file.read_text(), found))
        return found

    def _files(self, volume: Manifest) -> dict[str, bytes]:
        if "configMap" in volume:
            data = self._configs[volume["configMap"]["name"]]["data"]
            return {key: text.encode() for key, text in data.items()}
        if "secret" in volume:
            return self._secrets[volume["secret"]["secretName"]]
        return {}

    def _local(self, pod: Pod | None, word: str, places: dict[str, Path]) -> str:
        """Returns a word of a container's command with paths and names of this machine."""
        if places:
            names = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
            word = re.sub(rf"(?<![\w/])({names})(?![\w.-])", lambda m: str(places[m[1]]), word)
        if pod is None:
            return word
        for service in self.services:
            name = re.escape(service["metadata"]["name"])
            match = re.search(rf"\b{name}:(\d+)", word)
            if match:
                port = self.port_of(service["metadata"]["name"], int(match[1]))
                return word.replace(match[0], f"127.0.0.1:{port}")
        for number, local in pod.ports.items():
            if number.isdigit():
                word = re.sub(rf"(?<![\d.]){number}(?!\d)", str(local), word)
        return word.replace("0.0.0.0", "127.0.0.1")

    def _probe(self, container: Container, name: str) -> None:
        probe = container.spec.get(name)
        if probe is None:
            return
        deadline = time.monotonic() + START_S
        last = ""
        while time.monotonic() < deadline:
            status = container.process.poll()
            assert status is None, f"{container.name} ended with {status}:\n{container.said()}"
            last = self._asked(container, probe)
            if last == "200":
                return
            time.sleep(0.1)
        raise AssertionError(f"{name} of {container.name}: {last}\n{container.said()}")

    def _asked(self, container: Container, probe: Manifest) -> str:
        ports = container.pod.ports
        if "tcpSocket" in probe:
            return _connected(ports[str(probe["tcpSocket"]["port"])])
        if "grpc" in probe:
            return _grpc_health(ports[str(probe["grpc"]["port"])])
        get = probe["httpGet"]
        scheme = get.get("scheme", "HTTP").lower()
        url = f"{scheme}://127.0.0.1:{ports[get['port']]}{get['path']}"
        try:  # Like the kubelet, calls the pod's address and does not check the certificate.
            return str(httpx.get(url, timeout=5, verify=unchecked()).status_code)
        except httpx.TransportError as error:
            return repr(error)

    # End:

    def stop(self) -> None:
        """Ends each pod by SIGTERM within its time."""
        for pod in self.pods:
            self.end(pod)

    def end(self, pod: Pod) -> None:
        running = [each for each in pod.containers if each.process is not None]
        deadline = time.monotonic() + pod.spec["terminationGracePeriodSeconds"] + 30
        for beside in (False, True):
            ending = [each for each in running if each.stays_beside is beside]
            for container in ending:
                container.process.send_signal(signal.SIGTERM)
            for container in ending:
                try:
                    container.process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"{container.name}: {container.said()}") from None
                container.process = None

    def kill(self) -> None:
        for pod in self.pods:
            for container in pod.containers:
                if container.process is not None and container.process.poll() is None:
                    container.process.kill()
                    container.process.wait(120)
        shutil.rmtree(self._folder, ignore_errors=True)


def _connected(port: int) -> str:
    """Returns "200" if a server listens at the port."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError as error:
        return repr(error)
    return "200"


def _grpc_health(port: int) -> str:
    """Returns "200" if the gRPC health service at the port says that it serves."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            found = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError as error:
            return str(error)
    serving = health_pb2.HealthCheckResponse.SERVING
    return "200" if found.status == serving else str(found.status)


def unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def quiet_port() -> int:
    """Returns a port below the range from which the kernel gives ports to programs that ask for any
    port."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            number = random.randrange(15_000, 32_000)
            probe.bind(("127.0.0.1", number))
            return number


@contextmanager
def loopback(
    manifests: list[Manifest], folder: Path, secrets: dict[str, dict[str, bytes]] | None = None
) -> Iterator[Loopback]:
    made = Loopback(manifests, folder, secrets or {})
    try:
        yield made
    finally:
        made.kill()

"""Every container of the rendered chart starts, is ready, answers, and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import make_certificates
from tests.deploy.chart import CHART, NAMESPACE, RELEASE, VALUES, of_kind, render, values_of
from tests.deploy.loopback import Container, Loopback, Pod, loopback, unchecked
from tests.live.vllm_stub import MODEL

QUICK = "default-values.yaml"


def here(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values, changed for this machine, which has another model and no GPU."""
    if values.get("engine") != "vllm":
        return values
    vllm = {"kvEvents": False} | values.get("vllm", {})  # because the stub publishes no events
    return values | {"model": os.environ.get("MOONPOOL_TEST_MODEL", MODEL), "vllm": vllm}


def existing_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Returns the Secrets that the files of values say the cluster has."""
    files = make_certificates(folder, "authority", "part")
    named = zip(("tls.crt", "tls.key", "ca.crt"), files, strict=True)
    tls = {key: Path(path).read_bytes() for key, path in named}
    return {
        "llm-keys": {"keys": b"sk-one team share=2\n", "admin-key": b"sk-operator"},
        "llm-cluster": {"secret": bytes(range(32)).hex().encode()},
        "hub": {"token": b"hf_none"},
        "llm-tls": tls,
        "llm-cluster-tls": tls,
        "moonpool-cluster-tls": tls,
    }


def is_picker(container: Container) -> bool:
    """Whether this is a pod of the picker. Pods of the picker have a test of their own below,
    because the picker reads the API of a cluster."""
    return bool(container.spec["name"] == "epp")


def asked(
    place: Loopback, values: dict[str, Any], more: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    """Sends a call to the Service like a client, with a key of the Secret. `more` has further
    headers."""
    port = values.get("head", {}).get("service", {}).get("port", 8000)
    scheme = "https" if values.get("tls", {}).get("httpSecret") else "http"
    auth = values.get("auth", {})
    headers = dict(more or {})
    if auth.get("enabled", True):
        keys = place.secret(auth.get("existingSecret", f"{RELEASE}-moonpool-auth"), "keys")
        headers["authorization"] = f"Bearer {keys.decode().split()[0]}"
    url = f"{scheme}://127.0.0.1:{place.port_of(f'{RELEASE}-moonpool', port)}"
    with httpx.Client(base_url=url, headers=headers, verify=unchecked(), timeout=120) as client:
        return client.post("/v1/completions", json=body)


@pytest.mark.long
@pytest.mark.live
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.name == QUICK else pytest.mark.long) for path in VALUES],
    ids=lambda path: path.stem,
)
def test_what_is_rendered_starts_answers_and_ends(path: Path, tmp_path: Path) -> None:
    values = here(values_of(path))
    manifests = render(values)
    with loopback(manifests, tmp_path / "pods", existing_secrets(tmp_path)) as place:
        place.start(but=is_picker)
        answer = asked(place, values, prompt=list(range(40, 140)), max_tokens=4)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        if values.get("auth", {}).get("enabled", True):
            stranger = values | {"auth": {"enabled": False}}
            assert asked(place, stranger, prompt=[40]).status_code == 401
        for name in values.get("slo", {}).get("classes", {}):
            for given, status in ((name, 200), (f"no-{name}", 400)):
                answer = asked(place, values, {"x-slo-class": given}, prompt=[40], max_tokens=1)
                assert answer.status_code == status, answer.text
        place.stop()
        assert not any(container.process for pod in place.pods for container in pod.containers)


@pytest.mark.live
def test_workers_stay_when_the_head_is_replaced(tmp_path: Path) -> None:
    """Whether the pod of the head can end and another pod start, as in an upgrade of the
    release."""
    values: dict[str, Any] = {}
    with loopback(render(values), tmp_path / "pods") as place:
        place.start()
        first = asked(place, values, prompt=list(range(40, 140)), max_tokens=4).json()
        head = next(pod for pod in place.pods if "-head-" in pod.name)
        workers = [c.process.pid for pod in place.pods if pod is not head for c in pod.containers]
        place.end(head)
        place.start(but=lambda container: container.pod is not head)
        for pod in place.pods:
            place.wait_until_ready(pod)
        again = asked(place, values, prompt=list(range(40, 140)), max_tokens=4).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, "KVCache stayed"
        found = [c.process.pid for pod in place.pods if pod is not head for c in pod.containers]
        assert found == workers


@pytest.mark.live
@pytest.mark.long
def test_the_picker_finds_the_pods_of_its_pool(tmp_path: Path) -> None:
    """Runs with a real Envoy, and with a stub of the cluster's API that has the objects of the
    chart."""
    pytest.importorskip("kmock")
    pytest.importorskip("envoy.service.ext_proc")
    from tests.kubernetes_double import PODS, POOLS, ApiThread
    from tests.live.envoy import envoy, envoy_program

    envoy_program()
    with ApiThread() as api:
        values = here(values_of(CHART / "ci" / "gateway-values.yaml"))
        values["pool"] = {"enabled": False}
        values["epp"] = {"enabled": True, "extraArgs": [f"--kube-url={api.url}"]}
        # one replica, because the pool has one port for all pods, and so has this machine
        values["vllm"]["mixed"] = {"replicas": 1}
        manifests = render(values)
        with loopback(manifests, tmp_path / "pods") as place:
            (server,) = [pod for pod in place.pods if "moonpool.dev/vllm" in pod.labels]
            (picker,) = [pod for pod in place.pods if pod.containers[0].spec["name"] == "epp"]
            place.start(but=lambda one: one.spec["name"] != "vllm")
            (pool,) = of_kind(manifests, "InferencePool")
            (target,) = pool["spec"]["targetPorts"]
            target["number"] = server.ports[str(target["number"])]
            api.create(POOLS.format(NAMESPACE), pool)
            api.create(PODS.format(NAMESPACE), ready_pod(server))
            place.start(but=lambda one: one.pod is not picker)
            with envoy(tmp_path, picker.ports["9002"]) as gateway:
                body = {"model": values["model"], "prompt": list(range(40, 140)), "max_tokens": 4}
                headers = {"x-request-id": "mine", "x-slo-class": "chat"}
                until_s = time.monotonic() + 120
                while True:  # The picker first asks a server that was just listed what it serves.
                    url = f"{gateway}/v1/completions"
                    answer = httpx.post(url, json=body, headers=headers, timeout=120)
                    if answer.status_code == 200 or time.monotonic() > until_s:
                        break
                    time.sleep(0.2)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            url = f"http://127.0.0.1:{picker.ports['9090']}/explain/mine"
            told = httpx.get(url, timeout=60).json()
            assert (told["decode_instance"], told["slo_class"]) == (server.name, "chat")
            metrics = httpx.get(f"http://127.0.0.1:{picker.ports['metrics']}/metrics", timeout=60)
            assert "moonpool:slo_class_requests_total{" in metrics.text
            place.stop()


def ready_pod(pod: Pod) -> dict[str, Any]:
    """Returns a pod in the form of a cluster's API."""
    return {
        "metadata": {"name": pod.name, "namespace": NAMESPACE, "labels": pod.labels},
        "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }

"""Runs `moonpool epp` behind a real Envoy, in front of servers that do what a test tells them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc")

from benchmarks.suite.live.vllm_server import VllmServer
from tests.live.envoy import (
    PickerProcess,
    endpoints_text,
    envoy,
    free_port,
    picker_process,
)
from tests.live.small_folder import write_model_folder
from tests.live.vllm_stub import VllmStub
from tests.live.waiting import wait_until

PROMPT = [(7 * i) % 250 for i in range(100)]
ASKED = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
# A busy machine measures slow steps, and slow steps alone must not refuse a request here.
CALM = ("--admission", "none")


class Gateway:
    """Runs Envoy, a picker, and stubs as the endpoints `e0`, `e1` ..."""

    def __init__(self, url: str, picker: PickerProcess, stubs: list[VllmStub], file: Path) -> None:
        self.url, self.picker, self.stubs, self.file = url, picker, stubs, file
        self.http = httpx.Client(base_url=url, timeout=60)

    def complete(self, headers: dict[str, str] | None = None, **others: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=ASKED | others, headers=headers)

    def served(self, path: str = "/v1/completions") -> list[int]:
        """Returns how many calls of clients each endpoint has served."""
        return [len(stub.bodies(path)) for stub in self.stubs]

    def explain(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.picker.url}/explain/{request_id}").json()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model_folder(tmp_path_factory.mktemp("models") / "small")


@contextmanager
def gateway(
    folder: Path,
    model: str,
    *flags: str,
    num: int = 2,
    replaces: tuple[tuple[str, str], ...] = (),
    **roles: str,
) -> Iterator[Gateway]:
    with ExitStack() as stack:
        stubs = [VllmStub(root=model).start() for _ in range(num)]
        for stub in stubs:
            stack.callback(stub.stop)
            stub.prompt_token_s = 0.0005
        file = folder / f"endpoints-{stubs[0].port}.yaml"
        file.write_text(endpoints_text(*(stub.port for stub in stubs), **roles))
        picker = stack.enter_context(
            picker_process(folder, "--endpoints", str(file), *(flags or CALM))
        )
        url = stack.enter_context(envoy(folder, picker.grpc_port, replaces))
        picker.await_instances(*(f"e{number}" for number in range(num)))
        yield Gateway(url, picker, stubs, file)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("two"), model, *CALM) as found:
        yield found


def test_a_call_goes_where_the_conductor_says(two: Gateway) -> None:
    wait_until(lambda: two.picker.log.read_text().count("measured http") == 2)
    prompt = PROMPT * 6
    found = two.complete({"x-request-id": "first"}, prompt=prompt)
    assert found.status_code == 200
    assert len(found.json()["choices"][0]["token_ids"]) == 4
    wait_until(lambda: two.explain("first").get("outcome") == "stop")
    told = two.explain("first")
    number = int(told["decode_instance"][1:])
    assert two.served()[number] >= 1
    assert told["prompt_tokens"] == len(prompt)
    # The next turn goes to the server that caches the first turn, whatever the server's number.
    for _ in range(3):
        before = two.served()
        assert two.complete(prompt=[*prompt, 5, 6]).status_code == 200
        assert two.served()[number] == before[number] + 1


def test_streams_pass_and_are_counted(two: Gateway) -> None:
    lines = []
    headers = {"x-request-id": "stream"}
    body = CHAT | {"stream": True}
    with two.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) == 7 and lines[-1] == "data: [DONE]"
    wait_until(lambda: two.explain("stream").get("outcome") == "stop")
    told = two.explain("stream")
    assert told["generated_tokens"] == 6
    assert told["observed"]["ttft_s"] > 0


def test_large_bodies_pass_both_ways(two: Gateway) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "long " * 100_000}], "user": "u" * 300}
    found = two.http.post("/v1/chat/completions", json=body)
    # The prompt is longer than the context, so the server refuses it, or no server has room.
    assert found.status_code in (200, 422), found.text
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6_000_000}}
    body = CHAT | {"messages": [{"role": "user", "content": [image]}]}
    found = two.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    sent = [each for stub in two.stubs for each in stub.bodies("/v1/chat/completions")]
    assert body["messages"] in [each["messages"] for each in sent]


def test_calls_without_a_body_are_not_booked(two: Gateway) -> None:
    assert two.http.get("/v1/models").json()["data"][0]["id"] == "m"
    assert two.http.get("/nothing").status_code == 404


def test_wrong_calls_get_an_error_in_openais_form(two: Gateway) -> None:
    found = two.complete(model="other")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
    found = two.http.post("/v1/chat/completions", content=b"{")
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")
    for name in ("x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"):
        found = two.complete({name: "soon"})
        assert (found.status_code, found.json()["error"]["param"]) == (400, name)


def test_no_client_names_the_server(two: Gateway) -> None:
    """The picker ignores an address that a client names. Otherwise, clients would reach any address
    of the gateway's network."""
    with socket_that_counts() as (port, accepted):
        for header in ("x-gateway-destination-endpoint", "x-prefiller-host-port"):
            headers = {header: f"127.0.0.1:{port}"}
            assert two.complete(headers).status_code == 200
            assert two.http.get("/v1/models", headers=headers).status_code == 200
        assert not accepted()


@contextmanager
def socket_that_counts() -> Iterator[tuple[int, Callable[[], int]]]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        count = 0

        def accepted() -> int:
            nonlocal count
            try:
                server.accept()[0].close()
                count += 1
            except TimeoutError:
                pass
            return count

        yield server.getsockname()[1], accepted


def test_a_client_that_leaves_frees_its_booking(two: Gateway) -> None:
    for stub in two.stubs:
        stub.gap_s = 0.3
    try:
        body = ASKED | {"stream": True, "max_tokens": 200}
        headers = {"x-request-id": "cut"}
        with httpx.stream(
            "POST", f"{two.url}/v1/completions", json=body, headers=headers, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            assert two.picker.requests() == 1
        wait_until(lambda: two.picker.requests() == 0)
        assert two.explain("cut")["outcome"] == "abort"
    finally:
        for stub in two.stubs:
            stub.gap_s = 0.0


def test_a_server_that_refuses_is_not_tried_again(two: Gateway) -> None:
    for stub in two.stubs:
        stub.refuses = (400, "no such parameter")
    before = sum(two.served())
    try:
        found = two.complete({"x-request-id": "refused"})
        assert found.status_code == 400
        assert sum(two.served()) == before + 1
        wait_until(lambda: two.explain("refused").get("outcome") == "refused_by_engine")
        assert two.picker.requests() == 0
    finally:
        for stub in two.stubs:
            stub.refuses = None


def test_health_and_reflection(two: Gateway) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{two.picker.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        names = ("", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness")
        for name in names:
            told = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=120)
            assert told.status == health_pb2.HealthCheckResponse.SERVING, name
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([asked]), timeout=30
        )
        listed = {each.name for each in next(answers).list_services_response.service}
        assert {*names[1:2], "grpc.health.v1.Health"} <= listed
    assert httpx.get(f"{two.picker.url}/ready").status_code == 200
    assert "moonpool:" in httpx.get(f"{two.picker.url}/metrics").text
    assert httpx.post(f"{two.picker.url}/v1/completions", json=ASKED).status_code == 404


SUBSET = (
    (
        "                      message_timeout: 600s\n",
        (
            "                      message_timeout: 600s\n"
            "                      metadata_options:\n"
            "                        forwarding_namespaces: { untyped: [envoy.lb.subset_hint] }\n"
        ),
    ),
    (
        "                http_filters:\n",
        (
            "                http_filters:\n"
            "                  - name: envoy.filters.http.header_to_metadata\n"
            "                    typed_config:\n"
            '                      "@type": type.googleapis.com/envoy.extensions.filters.http.'
            "header_to_metadata.v3.Config\n"
            "                      request_rules:\n"
            "                        - header: x-subset\n"
            "                          on_header_present:\n"
            "                            metadata_namespace: envoy.lb.subset_hint\n"
            "                            key: x-gateway-destination-endpoint-subset\n"
            "                            type: STRING\n"
        ),
    ),
)


def test_only_endpoints_of_the_subset_are_chosen(tmp_path: Path, model: str) -> None:
    with gateway(tmp_path, model, num=3, replaces=SUBSET) as found:
        ports = [stub.port for stub in found.stubs]
        for number in (2, 0, 1, 0):
            before = found.served()
            subset = {"x-subset": f"127.0.0.1:{ports[number]}, 10.9.9.9:1"}
            assert found.complete(subset).status_code == 200
            assert found.served()[number] == before[number] + 1
        allowed = {"x-subset": f"127.0.0.1:{ports[0]},127.0.0.1:{ports[2]}"}
        before = found.served()
        for _ in range(4):
            assert found.complete(allowed, prompt=[1, 2, 3]).status_code == 200
        assert found.served()[1] == before[1]
        refused = found.complete({"x-subset": "10.9.9.9:1"})
        assert refused.status_code == 503
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert int(refused.headers["retry-after"]) >= 1
        alike = {"x-subset": f"127.0.0.1:{ports[1]}"}
        assert found.http.get("/v1/models", headers=alike).status_code == 200


@pytest.mark.long
def test_overload_is_refused_with_the_time_to_wait(tmp_path: Path, model: str) -> None:
    flags = ("--admission", "early", "--no-learning")
    with gateway(tmp_path, model, *flags, num=1) as found:
        found.stubs[0].first_token_s = 2.0
        strict = {"x-llm-d-slo-ttft-ms": "400", "x-slo-tpot-ms": "500"}
        results: list[httpx.Response] = []

        def ask(number: int) -> None:
            body = ASKED | {"prompt": [number] * 900, "max_tokens": 4, "stream": True}
            results.append(
                httpx.post(f"{found.url}/v1/completions", json=body, headers=strict, timeout=120)
            )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [each for each in results if each.status_code == 429]
        assert refused, [each.status_code for each in results]
        for each in refused:
            assert int(each.headers["retry-after"]) >= 1
            assert each.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert "predicted_ttft_s" in each.json()["error"]["projection"]
        assert found.served()[0] == len(results) - len(refused) - sum(
            each.status_code == 422 for each in results
        )
        wait_until(lambda: found.picker.requests() == 0)
        # A request that no idle endpoint could serve must not wait.
        hopeless = found.complete({"x-slo-ttft-ms": "0.001"}, prompt=[1] * 900, stream=True)
        assert hopeless.status_code == 422, hopeless.text
        assert "retry-after" not in hopeless.headers


def test_prefill_and_decode_are_chosen_together(tmp_path: Path, model: str) -> None:
    roles = {"e0": "prefill", "e1": "prefill", "e2": "decode", "e3": "decode"}
    flags = (*CALM, "--no-inline-prefill", "--no-inline-chunks")
    with gateway(tmp_path, model, *flags, num=4, **roles) as found:
        ports = [f"127.0.0.1:{stub.port}" for stub in found.stubs]
        for number in range(3):
            request_id = f"pair-{number}"
            body = CHAT | {"stream": True}
            with found.http.stream(
                "POST", "/v1/chat/completions", json=body, headers={"x-request-id": request_id}
            ) as response:
                assert response.status_code == 200
                assert len(list(response.iter_lines())) > 6
            wait_until(lambda name=request_id: found.explain(name).get("outcome") == "stop")
            told = found.explain(request_id)
            prefill, decode = told["prefill_instance"], told["decode_instance"]
            assert prefill in ("e0", "e1") and decode in ("e2", "e3")
            assert told["generated_tokens"] == 6
            sent = found.stubs[int(decode[1:])].headers
            own = next(each for each in sent if each.get("x-request-id") == request_id)
            assert own["x-prefiller-host-port"] == ports[int(prefill[1:])]
        assert found.served("/v1/chat/completions")[:2] == [0, 0]
        wait_until(lambda: found.picker.requests() == 0)
        # This holds for whole responses, and for a response that ends with its first token.
        assert found.complete().status_code == 200
        assert found.complete(max_tokens=1).status_code == 200
        wait_until(lambda: found.picker.requests() == 0)


@pytest.mark.long
def test_an_endpoint_that_dies_is_left_out(two: Gateway) -> None:
    for number in range(6):
        assert two.complete(prompt=[number] * 40).status_code == 200
    dead = two.stubs[0]
    dead.stop()
    statuses = [two.complete(prompt=[9, number] * 20).status_code for number in range(12)]
    assert statuses.count(503) <= 2, statuses  # only the first call may see the fault
    assert statuses[-6:] == [200] * 6
    wait_until(lambda: two.picker.instances() == ["e1"])
    assert two.picker.requests() == 0
    dead.start()
    wait_until(lambda: sorted(two.picker.instances()) == ["e0", "e1"])


def test_a_stream_that_is_cut_ends_its_booking(tmp_path: Path, model: str) -> None:
    with gateway(tmp_path, model, num=1) as found:
        stub = found.stubs[0]
        stub.dies_after, stub.gap_s = 2, 0.1
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(httpx.HTTPError))
            body = ASKED | {"stream": True, "max_tokens": 9}
            headers = {"x-request-id": "cut"}
            response = stack.enter_context(
                found.http.stream("POST", "/v1/completions", json=body, headers=headers)
            )
            lines = response.iter_lines()
            next(lines)
            assert found.picker.requests() == 1
            stub.may_die.set()
            list(lines)
        wait_until(lambda: found.picker.requests() == 0)
        assert found.explain("cut")["outcome"] in ("engine_error", "abort")


@pytest.mark.long
def test_the_file_may_change_at_any_time(tmp_path: Path, model: str) -> None:
    with gateway(tmp_path, model) as found, ExitStack() as stack:
        one, other = found.stubs
        new = VllmStub(root=model).start()
        stack.callback(new.stop)
        found.stubs.append(new)
        one.gap_s = other.gap_s = 0.2
        counts: list[int] = []

        def follow() -> None:
            body = ASKED | {"stream": True, "max_tokens": 40}
            with httpx.stream(
                "POST", f"{found.url}/v1/completions", json=body, timeout=120
            ) as response:
                counts.append(sum(line.startswith("data:") for line in response.iter_lines()))

        threads = [threading.Thread(target=follow) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(found.served()) == 4)
        text = endpoints_text(one.port, other.port, new.port)
        first = text.index("  - name: e0")
        found.file.write_text(text[:first] + text[text.index("  - name: e1") :])  # without e0
        wait_until(lambda: "e2" in found.picker.instances())
        for _ in range(4):
            before = found.served()
            assert found.complete(max_tokens=1).status_code == 200
            assert found.served()[0] == before[0]  # the endpoint that leaves gets no new call
        for thread in threads:
            thread.join()
        assert counts == [41] * 4  # Calls that the endpoint has begun are complete.
        wait_until(lambda: sorted(found.picker.instances()) == ["e1", "e2"])


@pytest.mark.long
def test_an_endpoint_that_comes_and_goes_is_held_off(tmp_path: Path, model: str) -> None:
    with gateway(tmp_path, model) as found:
        whole = found.file.read_text()
        without = whole[: whole.index("  - name: e1")]
        for _ in range(2):
            found.file.write_text(without)
            wait_until(lambda: found.picker.instances() == ["e0"])
            found.file.write_text(whole)
            wait_until(lambda: len(found.picker.instances()) == 2)
        assert "comes and goes" in found.picker.log.read_text()


OPEN = (
    (
        '                        - match: { prefix: "/" }\n',
        (
            "                        - match:\n"
            '                            prefix: "/"\n'
            "                            headers: [{ name: x-gateway-destination-endpoint,"
            " present_match: false }]\n"
            "                          route: { cluster: any_endpoint, timeout: 3600s }\n"
            '                        - match: { prefix: "/" }\n'
        ),
    ),
)


def open_cluster(port: int) -> tuple[str, str]:
    """Runs a cluster in which Envoy itself chooses an endpoint."""
    return (
        "  clusters:\n",
        (
            "  clusters:\n    - name: any_endpoint\n      type: STATIC\n      load_assignment:\n"
            "        cluster_name: any_endpoint\n        endpoints:\n          - lb_endpoints:\n"
            "              - endpoint:\n                  address:\n"
            f"                    socket_address: {{ address: 127.0.0.1, port_value: {port} }}\n"
        ),
    )


@pytest.mark.long
def test_fail_open_and_fail_closed(tmp_path: Path, model: str) -> None:
    stub = VllmStub(root=model).start()
    empty = tmp_path / "none.yaml"
    empty.write_text("endpoints: []\n")
    with ExitStack() as stack:
        stack.callback(stub.stop)
        closed = stack.enter_context(picker_process(tmp_path, "--endpoints", str(empty)))
        opened = stack.enter_context(
            picker_process(tmp_path, "--endpoints", str(empty), "--fail-open")
        )
        for picker in (closed, opened):
            wait_until(lambda one=picker: one.cluster_is_up())
        through = (*OPEN, open_cluster(stub.port))
        closed_url = stack.enter_context(envoy(tmp_path, closed.grpc_port, through))
        opened_url = stack.enter_context(envoy(tmp_path, opened.grpc_port, through))
        strict_url = stack.enter_context(envoy(tmp_path, opened.grpc_port))
        asked = json.dumps(ASKED).encode()
        # Without an endpoint, a picker that fails closed refuses a call, and a picker that fails
        # open lets the call pass.
        refused = httpx.post(f"{closed_url}/v1/completions", content=asked, timeout=60)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        found = httpx.post(f"{opened_url}/v1/completions", content=asked, timeout=60)
        assert found.status_code == 200
        # Without a picker, the route of a call that names no endpoint decides.
        opened.stop()
        closed.stop()

        def status_of(url: str) -> int:
            return httpx.post(f"{url}/v1/completions", content=asked, timeout=60).status_code

        # until Envoy knows that the picker is gone
        wait_until(lambda: status_of(opened_url) == 200)
        wait_until(lambda: status_of(closed_url) == 200)
        assert status_of(strict_url) == 503


STREAMS_BOTH_WAYS = (
    ("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED"),
    ("response_body_mode: STREAMED", "response_body_mode: FULL_DUPLEX_STREAMED"),
    ("request_trailer_mode: SKIP", "request_trailer_mode: SEND"),
)
"""What gateways of an InferencePool configure."""


def test_a_gateway_that_streams_both_ways_is_served_too(two: Gateway, tmp_path: Path) -> None:
    """Serves another gateway of the same picker."""
    with envoy(tmp_path, two.picker.grpc_port, STREAMS_BOTH_WAYS) as url:
        headers = {"x-request-id": "held"}
        answer = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers, timeout=60)
        assert answer.status_code == 200
        wait_until(lambda: two.explain("held").get("outcome") == "stop")
        assert two.explain("held")["generated_tokens"] == 4
        headers = {"x-request-id": "streamed"}
        body = CHAT | {"stream": True, "user": "u" * 400_000}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.text.count("data: {") == 6
        wait_until(lambda: two.explain("streamed").get("outcome") == "stop")
        assert two.explain("streamed")["generated_tokens"] == 6


def real_call(url: str, model: str, text: str, request_id: str) -> dict[str, Any]:
    """Sends a streamed chat and returns its usage."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-request-id": request_id}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300
    ) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))["usage"]
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_vllm_behind_a_real_envoy(tmp_path: Path) -> None:
    """Tests a real vLLM with MOONPOOL_VLLM_PYTHON and MOONPOOL_VLLM_MODEL, as in test_vllm, or with
    MOONPOOL_VLLM_AT, "PORT,EVENTS,REPLAY" of a vLLM that runs."""
    python, model = os.environ.get("MOONPOOL_VLLM_PYTHON"), os.environ.get("MOONPOOL_VLLM_MODEL")
    running = os.environ.get("MOONPOOL_VLLM_AT")
    if not running and not (python and model):
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON and MOONPOOL_VLLM_MODEL")
    with ExitStack() as stack:
        if running:
            port, events, replay = map(int, running.split(","))
        else:
            events, replay = free_port(), free_port()
            told = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            words = ["--enforce-eager", "--served-model-name", "own"]
            words += ["--kv-events-config", json.dumps(told)]
            assert python and model
            options = {"--block-size": 32, "--max-model-len": 1024}
            server = stack.enter_context(VllmServer(python, model, "0", options, words))
            port = server.port
        file = tmp_path / "endpoints.yaml"
        file.write_text("endpoints: []\n")
        picker = stack.enter_context(picker_process(tmp_path, "--endpoints", str(file), *CALM))
        url = stack.enter_context(envoy(tmp_path, picker.grpc_port))
        wait_until(picker.cluster_is_up)
        assert httpx.get(f"{url}/v1/models").status_code == 503
        labels = (
            f"{{moonpool.dev/kv-events-port: '{events}', moonpool.dev/kv-replay-port: '{replay}'}}"
        )
        entry = f"{{name: v, address: 127.0.0.1, port: '{port}', labels: {labels}}}"
        file.write_text(f"endpoints:\n  - {entry}\n")
        joined_s = picker.await_instances("v", within_s=300.0)
        print(f"used after {joined_s:.1f} s")
        text = "Tell me of the sea and of the wind. " * 40
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        first = real_call(url, name, text, "one")
        second = real_call(url, name, text, "two")

        def told_of(name: str) -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{picker.url}/explain/{name}").json()
            return found

        wait_until(lambda: told_of("two").get("outcome") in ("stop", "length"))
        told_one, told_two = told_of("one"), told_of("two")
        # The picker has rendered and tokenised the prompt like the server.
        assert told_one["prompt_tokens"] == first["prompt_tokens"]
        assert abs(told_two["generated_tokens"] - second["completion_tokens"]) <= 2
        cached = second["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert told_two["cached_tokens"] == cached
        assert picker.cluster()["instances"][0]["cache_view"]["source"] == "events"
        assert picker.requests() == 0

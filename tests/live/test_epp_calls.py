"""Tests `moonpool epp` behind a real Envoy: tenants that pay, several answers of a call, unknown
models, and fallbacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc")

from tests.live.envoy import endpoints_text, envoy, picker_process
from tests.live.small_folder import write_model_folder
from tests.live.test_epp import ASKED, CALM, CHAT, PROMPT, Gateway, gateway
from tests.live.vllm_stub import VllmStub, stubs
from tests.live.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("two"), model, *CALM) as found:
        wait_until(lambda: found.picker.log.read_text().count("measured http") == 2)
        yield found


def test_who_pays_is_told_apart_and_shares_what_is_cached(two: Gateway) -> None:
    prompt = [*range(1, 200), *PROMPT]
    payer = "x-llm-d-inference-fairness-id"
    before = two.served()
    assert two.complete({payer: "alice", "x-request-id": "a"}, prompt=prompt).status_code == 200
    wait_until(lambda: two.explain("a").get("outcome") == "stop")
    assert two.explain("a")["tenant"] == "alice/"
    first = next(n for n, (a, b) in enumerate(zip(before, two.served(), strict=True)) if a != b)
    for name in ("bob", "carol/../alice", "alice"):
        before = two.served()
        found = two.complete({payer: name, "x-request-id": name[:3]}, prompt=[*prompt, 7])
        assert found.status_code == 200
        # the call went to the endpoint that caches the prefix
        assert two.served()[first] == before[first] + 1
    assert two.explain("car")["tenant"] == "carol%2F..%2Falice/"


def test_blocks_of_another_salt_are_not_expected(two: Gateway) -> None:
    prompt = [*range(300, 500), *PROMPT]
    cached = {}
    for name, salt in (("one", "s"), ("same", "s"), ("other", "t"), ("none", None)):
        body = {"prompt": prompt} | ({"cache_salt": salt} if salt else {})
        assert two.complete({"x-request-id": f"salt-{name}"}, **body).status_code == 200
        wait_until(lambda name=name: two.explain(f"salt-{name}").get("outcome") == "stop")
        cached[name] = two.explain(f"salt-{name}")["cached_tokens"]
    assert cached["same"] > 200
    assert cached["one"] == cached["other"] == cached["none"] == 0


@pytest.mark.long
def test_several_answers_are_booked_as_such(two: Gateway) -> None:
    for stub in two.stubs:
        stub.gap_s = 0.2
    before = sum(two.served("/v1/chat/completions"))
    results: list[int] = []

    def ask() -> None:
        body = CHAT | {"n": 3, "stream": True, "max_tokens": 30}
        headers = {"x-request-id": "three"}
        url = f"{two.url}/v1/chat/completions"
        results.append(httpx.post(url, json=body, headers=headers, timeout=120).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait_until(lambda: two.picker.requests() == 3)
        places = {each["instance_id"] for each in two.picker.cluster()["instances"]}
        told = [two.explain(name) for name in ("three", "three-1", "three-2")]
        assert {each["decode_instance"] for each in told} <= places
        assert len({each["decode_instance"] for each in told}) == 1
        asking.join()
        wait_until(lambda: two.picker.requests() == 0)
    finally:
        for stub in two.stubs:
            stub.gap_s = 0.0
    assert results == [200]
    assert sum(two.served("/v1/chat/completions")) == before + 1
    told = [two.explain(name) for name in ("three", "three-1", "three-2")]
    assert [each["outcome"] for each in told] == ["stop"] * 3
    assert sum(each["generated_tokens"] for each in told) == 30


@pytest.mark.long
def test_answers_of_a_call_take_no_id_of_another_call(two: Gateway) -> None:
    for stub in two.stubs:
        stub.gap_s = 0.2
    results: list[int] = []

    def ask(name: str, count: int) -> None:
        body = CHAT | {"n": count, "stream": True, "max_tokens": 20}
        url = f"{two.url}/v1/chat/completions"
        headers = {"x-request-id": name}
        results.append(httpx.post(url, json=body, headers=headers, timeout=120).status_code)

    asking = threading.Thread(target=ask, args=("pair-1", 1))
    asking.start()
    try:
        wait_until(lambda: two.picker.requests() == 1)
        ask("pair", 2)
        asking.join()
    finally:
        for stub in two.stubs:
            stub.gap_s = 0.0
    assert results == [200, 200]
    wait_until(lambda: two.picker.requests() == 0)


@pytest.mark.long
def test_tokens_are_estimated_where_the_models_files_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with gateway(tmp_path, "nobody/has-this-model", *CALM) as found:
        words = "the words of a long conversation " * 20
        body = CHAT | {"messages": [{"role": "user", "content": words}]}
        answer = found.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "e"})
        assert answer.status_code == 200, answer.text
        wait_until(lambda: found.explain("e").get("outcome") == "stop")
        number = int(found.explain("e")["decode_instance"][1:])
        assert len(words) / 6 < found.explain("e")["prompt_tokens"] < len(words) / 2
        for turn in range(3):
            said = [*body["messages"], {"role": "user", "content": f"turn {turn}"}]
            before = found.served("/v1/chat/completions")
            more = found.http.post("/v1/chat/completions", json=CHAT | {"messages": said})
            assert more.status_code == 200
            assert found.served("/v1/chat/completions")[number] == before[number] + 1
        assert "its tokens are unknown" in found.picker.log.read_text()


POLICIES = "type.googleapis.com/envoy.extensions.load_balancing_policies"
OVERRIDE_HOST = f"""      type: STATIC
      connect_timeout: 5s
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": {POLICIES}.override_host.v3.OverrideHost
                override_host_sources:
                  - header: x-gateway-destination-endpoint
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.round_robin
                        typed_config:
                          "@type": {POLICIES}.round_robin.v3.RoundRobin
      load_assignment:
        cluster_name: picked_endpoint
        endpoints:
          - lb_endpoints:
"""
ORIGINAL_DST = """      type: ORIGINAL_DST
      lb_policy: CLUSTER_PROVIDED
      connect_timeout: 5s
      original_dst_lb_config:
        use_http_header: true
        http_header_name: x-gateway-destination-endpoint
"""
PLAIN_ROUTE = "route: { cluster: picked_endpoint, timeout: 3600s, idle_timeout: 3600s }"
RETRYING_ROUTE = PLAIN_ROUTE.replace(
    " }", ", retry_policy: { retry_on: connect-failure, num_retries: 1 } }"
)


@pytest.mark.long
def test_the_gateway_goes_on_to_a_fallback(tmp_path: Path, model: str) -> None:
    with ExitStack() as stack:
        stubs = [VllmStub(root=model).start() for _ in range(3)]
        for stub in stubs:
            stack.callback(stub.stop)
        file = tmp_path / "endpoints.yaml"
        file.write_text(endpoints_text(*(stub.port for stub in stubs)))
        flags = ("--endpoints", str(file), "--fallbacks", "2", *CALM)
        picker = stack.enter_context(picker_process(tmp_path, *flags))
        known = OVERRIDE_HOST + "".join(
            "              - endpoint: { address: { socket_address:"
            f" {{ address: 127.0.0.1, port_value: {stub.port} }} }} }}\n"
            for stub in stubs
        )
        replaces = ((ORIGINAL_DST, known), (PLAIN_ROUTE, RETRYING_ROUTE))
        url = stack.enter_context(envoy(tmp_path, picker.grpc_port, replaces))
        picker.await_instances("e0", "e1", "e2")
        found = Gateway(url, picker, stubs, file)
        prompt = PROMPT * 3
        assert found.complete({"x-request-id": "a"}, prompt=prompt).status_code == 200
        wait_until(lambda: found.explain("a").get("outcome") == "stop")
        chosen = stubs[int(found.explain("a")["decode_instance"][1:])]
        chosen.stop()  # stops the endpoint before any picker knows its prefix
        answer = httpx.post(
            f"{url}/v1/completions", json=ASKED | {"prompt": [*prompt, 5]}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        wait_until(lambda: picker.requests() == 0)


@pytest.mark.long
def test_a_named_model_alone_is_served_by_the_sources_of_a_file(tmp_path: Path, model: str) -> None:
    with ExitStack() as stack:
        stubs = [VllmStub(root=model).start(), VllmStub("other", root="/some/other").start()]
        for stub in stubs:
            stack.callback(stub.stop)
        listed, config = tmp_path / "endpoints.yaml", tmp_path / "picker.toml"
        listed.write_text(endpoints_text(*(stub.port for stub in stubs)))
        config.write_text(f'[vllm]\nendpoints = ["{listed}"]\n')
        picker = stack.enter_context(
            picker_process(tmp_path, model, "--config", str(config), *CALM)
        )
        picker.await_instances("e0")
        wait_until(lambda: "e1 is not used" in picker.log.read_text())
        assert "e0 is not used" not in picker.log.read_text()


@pytest.mark.long
def test_a_rank_is_an_endpoint_and_its_number_goes_along(tmp_path: Path, model: str) -> None:
    with ExitStack() as stack:
        stub = stack.enter_context(stubs(VllmStub("m", root=model)))[0]
        stub.num_ranks = 2
        file = tmp_path / "endpoints.yaml"
        label = "    labels:\n      moonpool.dev/data-parallel-size: all\n"
        file.write_text(endpoints_text(stub.port) + label)
        flags = ("--endpoints", str(file), "--fallbacks", "1", *CALM)
        picker = stack.enter_context(picker_process(tmp_path, *flags))
        url = stack.enter_context(envoy(tmp_path, picker.grpc_port))
        picker.await_instances("e0.0", "e0.1")
        wait_until(lambda: picker.log.read_text().count("measured http") == 2)
        found = Gateway(url, picker, [stub], file)
        places: dict[int, set[str]] = {}
        for turn in range(3):
            for number in range(4):
                prompt = [5 + number] * (96 + 16 * turn)
                own = {"x-data-parallel-rank": "7"}  # names a rank, which no client may choose
                assert found.complete(own, prompt=prompt).status_code == 200
                places.setdefault(number, set()).add(stub.headers[-1]["x-data-parallel-rank"])
        assert all(len(ranks) == 1 for ranks in places.values())
        assert set.union(*places.values()) <= {"0", "1"}
        stub.num_ranks = 3
        picker.await_instances("e0.0", "e0.1", "e0.2")


def test_an_agents_program_is_known_behind_a_gateway(two: Gateway) -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert two.complete({"x-request-id": "lead", "x-session-id": "s"}).status_code == 200
    assert two.complete({"x-request-id": "agent", **headers}).status_code == 200
    wait_until(lambda: two.explain("agent").get("outcome") == "stop")
    told = two.explain("agent")
    assert (told["program"], told["parent_program"]) == ("s:a", "s")

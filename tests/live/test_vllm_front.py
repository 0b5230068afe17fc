"""Runs the head in front of vLLM stubs that a test controls: names, several models, forwarded
calls, faults, and known caches."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import ServerError, free_port
from tests.forked.commands import LocalServer, run_command
from tests.live.calls import fresh
from tests.live.vllm_stub import (
    MODEL,
    POOLING,
    SILENT_S,
    VllmStub,
    picture,
    stubs,
    tokens_after,
)
from tests.live.waiting import wait_until

OTHER_MODEL = "random:hidden=32,layers=1,heads=2,kv_heads=1,inter=64,vocab=280"
PROMPT = [(7 * i) % 250 for i in range(200)]
EASY = ["--admission", "none", "--slo-ttft", "600"]


def front(*made: VllmStub, words: tuple[str, ...] = ()) -> LocalServer:
    named = [word for stub in made for word in ("--vllm", stub.url)]
    return LocalServer([*words, *named, *EASY])


def post(server: LocalServer, path: str, **body: Any) -> httpx.Response:
    return fresh.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: LocalServer, **body: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True} | body
    answer = post(server, "/v1/completions", **asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def look(parts: list[Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4} | more


@pytest.fixture(scope="module")
def zoo() -> Iterator[tuple[LocalServer, VllmStub, VllmStub, VllmStub]]:
    """Serves three models: one with two names and an adapter, one with another root, and a pooling
    model."""
    made = (
        VllmStub("m", "mm", adapters=("poet",)),
        VllmStub("other", root=OTHER_MODEL, max_model_len=512),
        VllmStub("embed", root=MODEL, paths=POOLING),
    )
    with stubs(*made), front(*made) as server:
        yield server, *made


Zoo = tuple[LocalServer, VllmStub, VllmStub, VllmStub]


def test_models_have_their_servers_names(zoo: Zoo) -> None:
    server = zoo[0]
    listed = fresh.get(f"{server.url}/v1/models").json()["data"]
    found = {one["id"]: (one["root"], one["parent"], one["max_model_len"]) for one in listed}
    assert found == {
        "m": (MODEL, None, 1024),
        "mm": (MODEL, None, 1024),
        "poet": ("/adapters/poet", "m", 1024),
        "other": (OTHER_MODEL, None, 512),
        "embed": (MODEL, None, 1024),
    }
    missing = post(server, "/v1/completions", model="nobody", prompt="x")
    assert missing.status_code == 404
    assert "This server has m, mm, poet, " in missing.text, "the model of the first --vllm"
    assert fresh.get(f"{server.url}/v1/models/mm").json()["id"] == "mm"
    assert fresh.get(f"{server.url}/v1/models/nobody").status_code == 404


@pytest.mark.parametrize(
    ("name", "place"), [("m", 1), ("mm", 1), (MODEL, 1), ("poet", 1), ("other", 2), (None, 1)]
)
def test_a_call_goes_to_the_model_that_it_names(zoo: Zoo, name: str | None, place: int) -> None:
    server, stub = zoo[0], zoo[place]
    assert isinstance(stub, VllmStub)
    num_before = len(stub.bodies("/v1/completions"))
    answer = complete(server, **({} if name is None else {"model": name}))
    assert answer["choices"][0]["token_ids"] == tokens_after(PROMPT, 3)
    assert answer["model"] == (name or "m")
    (sent,) = stub.bodies("/v1/completions")[num_before:]
    assert sent["model"] == ("poet" if name == "poet" else stub.names[0])


def test_each_model_has_a_context_of_its_own(zoo: Zoo) -> None:
    server = zoo[0]
    assert complete(server, model="m", prompt=[5] * 700)["usage"]["prompt_tokens"] == 700
    refused = post(server, "/v1/completions", model="other", prompt=[5] * 700, max_tokens=3)
    assert refused.status_code == 400
    assert "maximum context length is 512 tokens" in refused.text


def test_a_large_body_goes_to_its_model_too(zoo: Zoo) -> None:
    """Uses two processes to read large bodies, with the tokenizer of their model."""
    server = zoo[0]
    padded = {"metadata": {"x": "y" * 100_000}}
    for name in ("m", "other"):
        answer = complete(server, model=name, prompt="ab", **padded)
        assert answer["usage"]["prompt_tokens"] >= 2
        assert answer["model"] == name


def test_pooling_tasks_reach_the_servers_that_have_them(zoo: Zoo) -> None:
    server, _, _, stub = zoo
    for path in POOLING:
        answer = post(server, path, model="embed", input="some text", query="q", normal=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "embed"
        assert stub.bodies(path)[-1] == {
            "model": "embed",
            "input": "some text",
            "query": "q",
            "normal": True,
        }
    assert post(server, "/classify", model="embed", input="x").status_code == 404
    assert post(server, "/pooling", model="m", input="x").status_code == 404
    assert post(server, "/v1/embeddings", model="m", input="x").status_code == 404
    refused = post(server, "/v1/completions", model="embed", prompt="x")
    assert refused.status_code == 404
    assert "generates no text" in refused.text


def test_an_image_reaches_the_server_as_the_client_sent_it(zoo: Zoo) -> None:
    server, stub = zoo[0], zoo[1]
    parts = [{"type": "text", "text": "What is it?"}, picture()]
    asked = look(
        parts,
        model="mm",
        mm_processor_kwargs={"do_resize": False},
        kv_transfer_params={"remote_host": "evil"},
        priority=3,
        request_id="r",
    )
    answer = post(server, "/v1/chat/completions", **asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "xxxx"
    sent = stub.bodies("/v1/chat/completions")[-1]
    expected = look(parts, model="m", mm_processor_kwargs={"do_resize": False})
    assert sent == expected, "no field that would reach another server or request"
    explained = fresh.get(f"{server.url}/explain/{answer.headers['x-request-id']}").json()
    assert explained["outcome"] == "stop"
    assert explained["generated_tokens"] == 4
    assert explained["prompt_tokens"] > 512


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_all_apis_with_messages_take_images(zoo: Zoo, path: str) -> None:
    server, stub = zoo[0], zoo[1]
    content = [{"type": "text", "text": "Look."}]
    if path == "/v1/responses":
        content += [{"type": "input_image", "image_url": "data:,"}]
        asked = {"input": [{"role": "user", "content": content}]}
    elif path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        image = [{"type": "image", "source": source}]
        result = [{"type": "tool_result", "tool_use_id": "t", "content": image}]
        asked = {"messages": [{"role": "user", "content": result}], "max_tokens": 4}
    else:
        content += [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]
        asked = {"messages": [{"role": "user", "content": content}]}
    answer = post(server, path, model="m", **asked)
    assert answer.status_code == 200, answer.text
    assert stub.bodies(path)[-1] == asked | {"model": "m"}


def events_of(server: LocalServer, path: str, **body: Any) -> Iterator[Any]:
    """Yields the JSON of a stream's events, without the closing [DONE]."""
    asked = body | {"stream": True}
    with fresh.stream("POST", f"{server.url}{path}", json=asked, timeout=60) as said:
        assert said.status_code == 200, said.read()
        for line in said.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def streamed(server: LocalServer, **body: Any) -> list[Any]:
    """Returns the events of a chat: decoded JSON, or the word [DONE]."""
    found: list[Any] = []
    asked = body | {"stream": True}
    with fresh.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60) as said:
        assert said.status_code == 200, said.read()
        assert said.headers["content-type"].startswith("text/event-stream")
        for line in said.iter_lines():
            if line.startswith("data: "):
                word = line.removeprefix("data: ")
                found.append(json.loads(word) if word.startswith("{") else word)
    return found


def test_a_streamed_answer_to_an_image_is_the_servers(zoo: Zoo) -> None:
    events = streamed(zoo[0], **look([picture()], model="m"))
    assert len(events) == 5
    assert events[-1] == "[DONE]"
    assert [e["choices"][0]["delta"]["content"] for e in events[:-1]] == ["x"] * 4


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SAID = [{"role": "user", "content": "Add one, and one more, and then say what it is."}]


def test_tool_calls_that_the_server_finds_reach_the_client_as_they_are() -> None:
    with stubs(VllmStub("m", parses=("tools",))) as (stub,), front(stub) as server:
        asked = {"messages": SAID, "tools": TOOLS, "max_tokens": 4, "own_field": [1]}
        answer = post(server, "/v1/chat/completions", **asked)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["id"] == "own-1"
        assert stub.bodies("/v1/chat/completions")[-1] == asked | {"model": "m"}
        first, *_ = streamed(server, **asked)
        assert first["choices"][0]["delta"]["tool_calls"] == [call]
        for path, key in (("/v1/responses", "input"), ("/v1/messages", "messages")):
            tool = {"type": "function", "name": "f", "parameters": {}, "input_schema": {}}
            body = {key: SAID, "tools": [tool], "max_tokens": 4}
            assert post(server, path, **body).status_code == 200
            assert stub.bodies(path)[-1] == body | {"model": "m"}
        before = len(stub.bodies("/v1/completions"))
        assert post(server, "/v1/chat/completions", messages=SAID, max_tokens=4).status_code == 200
        assert len(stub.bodies("/v1/completions")) == before + 1, "it outlives its server"


def test_a_server_that_shows_reasoning_answers_all_chats() -> None:
    with stubs(VllmStub("m", parses=("reasoning",))) as (stub,), front(stub) as server:
        long = [{"role": "user", "content": "a b c d e f g h " * 12}]
        for number in range(2):
            answer = post(server, "/v1/chat/completions", messages=long, max_tokens=4)
            assert answer.json()["choices"][0]["message"]["reasoning"] == "r"
            explain = f"{server.url}/explain/{answer.headers['x-request-id']}"
            explained = fresh.get(explain).json()
            assert (explained["cached_tokens"] > 100) is bool(number), "its prompt is known"
        assert not stub.bodies("/v1/completions")
        assert complete(server)["choices"][0]["token_ids"] == tokens_after(PROMPT, 3)


@pytest.mark.long
def test_parsing_stays_here_where_it_is_wanted_or_a_server_has_none() -> None:
    both = VllmStub("m", parses=("tools", "reasoning")), VllmStub("m")
    with stubs(*both) as (one, other):
        for made, words in (((one, other), ()), ((one,), ("--vllm-parsers", "moonpool"))):
            with front(*made, words=words) as server:
                for _ in range(3):
                    asked = {"messages": SAID, "tools": TOOLS, "tool_choice": "none"}
                    answer = post(server, "/v1/chat/completions", max_tokens=4, **asked)
                    assert answer.status_code == 200, answer.text
        assert not one.bodies("/v1/chat/completions")
        assert not other.bodies("/v1/chat/completions")


def test_what_the_server_refuses_is_refused_with_its_words(zoo: Zoo) -> None:
    server, stub = zoo[0], zoo[1]
    for status in (400, 404, 422, 501):
        stub.refuses = (status, "no such picture")
        try:
            answer = post(server, "/v1/chat/completions", **look([picture()], model="m"))
        finally:
            stub.refuses = None
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "no such picture"


def test_scores_of_a_prompt_come_from_the_server(zoo: Zoo) -> None:
    server = zoo[0]
    answer = complete(server, prompt=[9, 11, 12], echo=True, logprobs=1, max_tokens=2)
    scored = answer["choices"][0]["logprobs"]
    assert scored["token_logprobs"] == [None, -11.0, -12.0, -0.5, -0.5]
    listed = complete(server, prompt=[9, 11, 12], prompt_logprobs=1)["choices"][0]
    first = {key: value["logprob"] for key, value in listed["prompt_logprobs"][1].items()}
    assert first == {"11": -11.0, "7": -0.1}


def test_metrics_have_the_model_of_each_sample(zoo: Zoo) -> None:
    server = zoo[0]
    complete(server, model="other")
    text = fresh.get(f"{server.url}/metrics").text
    assert text.count("# TYPE vllm:request_success_total counter") <= 1
    assert text.count("# HELP vllm:prompt_tokens_total") == 1
    for name in ("m", "other"):
        assert f'vllm:prompt_tokens_total{{engine="0",model_name="{name}"}}' in text
    described = fresh.get(f"{server.url}/cluster").json()
    assert described["models"][0]["name"] == "m"
    assert {one["name"] for one in described["models"]} == {"m", "other", "embed"}
    assert {one["model"] for one in described["instances"]} == {"m", "other", "embed"}
    for name in ("m", "other"):
        log = fresh.get(f"{server.url}/cluster/event_log?model={name}")
        assert log.content.startswith(b"moonpool event log")
    assert fresh.get(f"{server.url}/cluster/event_log?model=nobody").status_code == 404


def test_a_name_that_is_given_is_the_only_one() -> None:
    with stubs(VllmStub("m")) as (stub,), front(stub, words=("--served-model-name", "x")) as server:
        listed = fresh.get(f"{server.url}/v1/models").json()["data"]
        assert [(one["id"], one["root"]) for one in listed] == [("x", MODEL)]
        assert complete(server, model="x")["model"] == "x"
        assert post(server, "/v1/completions", model="m", prompt="x").status_code == 404


def test_a_named_model_is_the_only_one_that_is_taken() -> None:
    made = VllmStub("m"), VllmStub("other", root=OTHER_MODEL)
    with (
        stubs(*made),
        pytest.raises(ServerError, match="but the head serves"),
        front(*made, words=(MODEL,)),
    ):
        pass


def test_an_adapter_goes_where_it_is_loaded() -> None:
    made = VllmStub("m"), VllmStub("m", adapters=("poet",))
    with stubs(*made) as (plain, loaded), front(*made) as server:
        for _ in range(4):
            complete(server, model="poet")
        assert not [b for b in plain.bodies("/v1/completions") if b["model"] == "poet"]
        assert len([b for b in loaded.bodies("/v1/completions") if b["model"] == "poet"]) == 4


def listed(server: LocalServer) -> set[str]:
    return {one["id"] for one in fresh.get(f"{server.url}/v1/models").json()["data"]}


@pytest.mark.long
def test_a_server_may_load_adapters_and_change_its_model_while_it_serves() -> None:
    made = VllmStub("m"), VllmStub("m")
    with stubs(*made) as (first, second), front(*made) as server:
        second.adapters = ("poet",)
        wait_until(lambda: "poet" in listed(server))
        complete(server, model="poet")
        assert [b["model"] for b in second.bodies("/v1/completions")] == ["poet"]
        second.adapters = ()
        wait_until(lambda: "poet" not in listed(server))
        assert post(server, "/v1/completions", model="poet", prompt="x").status_code == 404
        # puts another server behind the address of the second
        second.root, second.names = OTHER_MODEL, ("other",)
        # The model is listed as soon as its server names it, and serves once the server has
        # answered a question.
        ask = {"model": "other", "prompt": PROMPT, "max_tokens": 1}
        wait_until(lambda: post(server, "/v1/completions", **ask).status_code == 200)
        assert complete(server, model="other")["model"] == "other"
        assert complete(server, model="m")["model"] == "m"
        assert second.bodies("/v1/completions")[-1]["model"] == "other"
        assert first.bodies("/v1/completions")[-1]["model"] == "m"


def test_a_call_to_an_adapter_that_has_just_left_a_server_goes_to_another_one() -> None:
    made = VllmStub("m", adapters=("poet",)), VllmStub("m", adapters=("poet",))
    with stubs(*made) as (first, second), front(*made) as server:
        first.adapters = ()
        second.first_token_s = 0.2
        ask = {"model": "poet", "prompt": PROMPT, "max_tokens": 2}
        seen = {**look([picture()]), "model": "poet"}
        asked = [("/v1/completions", ask), ("/v1/chat/completions", seen)] * 4
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda one: post(server, one[0], **one[1]), asked))
        assert [answer.status_code for answer in answers] == [200] * len(asked)
        assert any(body["model"] == "poet" for _, body in first.calls), "it was tried"


@pytest.mark.long
def test_a_forwarded_call_outlives_its_server_before_the_first_byte() -> None:
    made = VllmStub("m"), VllmStub("m")
    with stubs(*made), front(*made) as server:

        def num_calls() -> list[int]:
            return [len(stub.bodies("/v1/chat/completions")) for stub in made]

        made[0].num_deaths = made[1].num_deaths = 1
        answer = post(server, "/v1/chat/completions", **look([picture()]))
        assert answer.status_code == 200, answer.text
        assert sorted(num_calls()) == [1, 2], "one after the other, and then one of them again"
        made[0].num_deaths = made[1].num_deaths = 1
        assert len(streamed(server, **look([picture(1)]))) == 5
        made[0].dies_after = made[1].dies_after = 0
        refused = post(server, "/v1/chat/completions", **look([picture(2)]))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "engine_error"


def test_after_the_first_byte_one_error_ends_it() -> None:
    made = VllmStub("m"), VllmStub("m")
    with stubs(*made), front(*made) as server:
        made[0].dies_after = made[1].dies_after = 2
        before = sum(len(stub.bodies("/v1/chat/completions")) for stub in made)
        events = []
        for event in events_of(server, "/v1/chat/completions", **look([picture()])):
            events.append(event)
            if len(events) == 2:  # ends the loop when both models have come
                for stub in made:
                    stub.may_die.set()
        assert [e["choices"][0]["delta"]["content"] for e in events[:2]] == ["x", "x"]
        assert len(events) == 3
        assert events[2]["error"]["code"] == "engine_error"
        calls = sum(len(stub.bodies("/v1/chat/completions")) for stub in made)
        assert calls - before == 1, "it is not tried again"
        assert all(one["booked_decodes"] == 0 for one in server.instances())


def test_a_forwarded_stream_speaks_while_its_server_is_silent() -> None:
    """Keeps the server silent until the client has received two keep-alives of the head."""
    words = ("--keepalive", "0.1")
    with stubs(VllmStub("m")) as (stub,), front(stub, words=words) as server:
        stub.may_speak.clear()
        asked, raw = look([picture()], stream=True), b""
        with fresh.stream(
            "POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60
        ) as said:
            assert said.status_code == 200
            for piece in said.iter_raw():
                raw += piece
                if raw.count(b"\n\n") >= 2:
                    stub.may_speak.set()
        silent, _, _ = raw.partition(b"data: ")
        assert [line[:2] for line in silent.split(b"\n\n")[:2]] == [b": "] * 2
        assert raw.count(b'"content": "x"') == 4
        assert raw.endswith(b"data: [DONE]\n\n")


def test_who_leaves_ends_a_forwarded_call_at_the_server() -> None:
    with stubs(VllmStub("m")) as (stub,), front(stub) as server:
        stub.may_speak.clear()
        with pytest.raises(httpx.ReadTimeout):
            fresh.post(f"{server.url}/v1/chat/completions", json=look([picture()]), timeout=1.0)
        cluster = lambda: fresh.get(f"{server.url}/cluster").json()  # noqa: E731
        wait_until(lambda: cluster()["requests_under_way"] == 0, wait_s=SILENT_S / 2)
        late = {"x-request-timeout-ms": "500"}
        answer = fresh.post(
            f"{server.url}/v1/chat/completions", json=look([picture()]), headers=late, timeout=60
        )
        assert answer.status_code == 504
        stub.may_speak.set()


def test_tenants_are_kept_apart_in_forwarded_calls_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-a a\nkey-b b\n")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    with stubs(VllmStub("m")) as (stub,), front(stub, words=keys) as server:
        salts = []
        for key in ("key-a", "key-b", "key-a"):
            answer = fresh.post(
                f"{server.url}/v1/chat/completions",
                json=look([picture()], cache_salt="mine"),
                headers={"authorization": f"Bearer {key}"},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
            salts.append(stub.bodies("/v1/chat/completions")[-1]["cache_salt"])
        assert salts[0] == salts[2] != salts[1]
        assert "mine" not in salts


def test_it_serves_before_it_has_measured() -> None:
    slow = VllmStub("m")
    slow.first_token_s = 1.0
    with stubs(slow), front(slow) as server:
        assert len(slow.calls) <= 4, "it would have measured for 20 s"
        instance = server.instances()[0]
        assert complete(server)["choices"][0]["token_ids"] == tokens_after(PROMPT, 3)
        slow.first_token_s = 0.0
        wait_until(lambda: server.instances()[0]["cost"] != instance["cost"])


def test_a_prefill_vllm_without_a_connector_is_told_at_the_start() -> None:
    with (
        stubs(VllmStub("m", connector=False), VllmStub("m")) as (one, other),
        pytest.raises(ServerError, match="start it with a --kv-transfer-config"),
        LocalServer(["--vllm-prefill", one.url, "--vllm-decode", other.url, *EASY]),
    ):
        pass


def test_a_prompt_goes_to_a_server_whose_context_it_fits() -> None:
    short, long = VllmStub("m", max_model_len=512), VllmStub("m", max_model_len=4096)
    with stubs(short, long), front(short, long) as server:
        listed = fresh.get(f"{server.url}/v1/models").json()["data"]
        assert [one["max_model_len"] for one in listed] == [4096]
        assert "size of the pool" not in "\n".join(server.log_lines())
        for number in range(8):
            prompt = [number] * (600 + number)
            answer = complete(server, prompt=prompt)
            assert answer["choices"][0]["token_ids"] == tokens_after(prompt, 3)
        assert not short.bodies("/v1/completions")
        refused = post(server, "/v1/completions", prompt=[5] * 5000, max_tokens=3)
        assert refused.status_code == 400
        assert "maximum context length is 4096 tokens" in refused.text
        assert len(long.bodies("/v1/completions")) == 8


@pytest.mark.long
def test_an_answer_that_outgrows_its_server_goes_on_where_there_is_more_context() -> None:
    short = VllmStub("m", max_model_len=512)
    long = VllmStub("m", max_model_len=4096)
    # slow prompts, so that the head measures `short` as the faster server
    long.prompt_token_s = 0.001
    with stubs(short, long), front(short, long) as server:
        wait_until(lambda: all(one["cost"]["domain"] for one in server.instances()))  # measured
        complete(server, max_tokens=1)  # teaches the head that answers are short
        answer = complete(server, prompt=[3] * 470, max_tokens=200)
        assert answer["choices"][0]["token_ids"] == tokens_after([3] * 470, 200)
        assert short.bodies("/v1/completions")[-1]["max_tokens"] == 42
        assert long.bodies("/v1/completions")[-1]["max_tokens"] == 158


@pytest.mark.long
def test_events_that_do_not_come_are_said_and_the_cache_is_assumed() -> None:
    pytest.importorskip("zmq")
    stub, port = VllmStub("m"), free_port()
    stub.num_ranks = 2
    stub.sources = {"0": {"endpoint": "tcp://*:1"}, "1": {"endpoint": f"tcp://127.0.0.1:{port}"}}
    with ExitStack() as stack:
        stack.enter_context(stubs(stub))
        words = ["--vllm", f"{stub.url}@1,tcp://127.0.0.1:{port}", *EASY]
        server = stack.enter_context(LocalServer(words))
        complete(server)
        again = complete(server)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        wait_until(lambda: "note" in run_command("status", server.url).stdout)
        told = run_command("status", server.url).stdout
        assert f'"endpoint": "tcp://*:{port}"' in told
        view = server.instances()[0]["cache_view"]
        assert view["source"] in ("assumed", "distrusted")
        text = fresh.get(f"{server.url}/metrics").text
        assert 'moonpool:engine_cache_source{instance_id="mixed-0",model_name="m",' in text


@pytest.mark.long
def test_hits_that_the_server_counts_are_compared() -> None:
    with stubs(VllmStub("m")) as (stub,), front(stub) as server:
        stub.hit_share = 0.5
        numbers = iter(range(10_000))

        def is_said() -> bool:
            for number in range(4):
                start = next(numbers) * 31 + number
                complete(server, prompt=[(start + i * 7) % 250 for i in range(500)])
            return "of the last" in run_command("status", server.url).stdout

        wait_until(is_said)
        told = run_command("status", server.url).stdout
        assert "prompt tokens cached, where moonpool expected 0%" in told


def head_of(server: LocalServer) -> int:
    return int(fresh.get(f"{server.url}/cluster").json()["head"]["pid"])


@pytest.mark.long
def test_the_next_head_goes_on_with_all_models() -> None:
    """After the head was replaced, streams of tokens must continue with the next token, and a
    forwarded call must end with one error."""
    made = VllmStub("m"), VllmStub("other", root=OTHER_MODEL)
    with stubs(*made), front(*made) as server:
        made[1].gap_s = made[0].gap_s = 0.2
        found: dict[str, list[Any]] = {"text": [], "image": []}

        def ask(name: str, path: str, **body: Any) -> None:
            found[name].extend(events_of(server, path, **body))

        text = {"model": "other", "prompt": PROMPT, "max_tokens": 20, "return_token_ids": True}
        threads = [
            threading.Thread(target=ask, args=("text", "/v1/completions"), kwargs=text),
            threading.Thread(
                target=ask,
                args=("image", "/v1/chat/completions"),
                kwargs=look([picture()], model="m", max_tokens=200),
            ),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: bool(found["text"]) and bool(found["image"]))
        os.kill(head_of(server), signal.SIGKILL)
        for thread in threads:
            thread.join()
        tokens = [t for e in found["text"] for t in e["choices"][0].get("token_ids", [])]
        assert tokens == tokens_after(PROMPT, 20)
        *shown, last = found["image"]
        assert 0 < len(shown) < 200
        assert all(event["choices"][0]["delta"]["content"] == "x" for event in shown)
        assert last["error"]["code"] == "head_replaced"
        made[1].gap_s = 0.0
        assert complete(server, model="other")["model"] == "other"

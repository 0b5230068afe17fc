"""Runs `serve --vllm` in front of servers of other makes: SGLang with its KV events, llama-server
with adapters, Ollama and TensorRT-LLM, as stubs that speak their protocols. A real llama-server is
in `test_llama_server`, whole dialects are in `tests/unit/vllm/test_makes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.other_makes import (
    CHAT,
    LlamaStub,
    OllamaStub,
    SglangStub,
    TensorRtStub,
    running,
)
from tests.live.test_vllm_front import EASY, complete, post
from tests.live.vllm_stub import tokens_after
from tests.live.waiting import wait_until

pytestmark = pytest.mark.live


def front(*places: str, words: tuple[str, ...] = ()) -> LocalServer:
    named = [word for place in places for word in ("--vllm", place)]
    return LocalServer([*named, *EASY, *words])


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + 7 * i) % 250 for i in range(200)]


def models(server: LocalServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fresh.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    return found


def prompts(stub: SglangStub) -> list[list[int]]:
    return [body["input_ids"] for path, body in stub.calls if path == "/generate"]


@pytest.mark.long
def test_sglangs_events_say_where_prefixes_are() -> None:
    """This also holds for prompts that moonpool has not sent: each request goes to the server that
    caches its prefix."""
    pytest.importorskip("zmq")
    one, other = SglangStub(), SglangStub()
    with running(one, other), front(one.place, other.place) as server:
        for number in range(4):
            holder = (one, other)[number % 2]
            body = {"input_ids": prompt_of(number), "sampling_params": {"max_new_tokens": 1}}
            told = fresh.post(f"{holder.url}/generate", json=body | {"stream": True}, timeout=60)
            assert told.status_code == 200

        def is_known() -> bool:
            known = [each["indexed_blocks"] for each in server.instances()]
            return len(known) == 2 and min(known) >= 24

        wait_until(is_known)
        # By assumed times, the server that is measured first may seem faster, whatever it caches.
        wait_until(lambda: all(one["cost"]["domain"] for one in server.instances()))
        for number in range(4):
            longer = [*prompt_of(number), 5, 6, 7]
            found = complete(server, prompt=longer)
            assert found["choices"][0]["token_ids"] == tokens_after(longer, 3)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
            assert longer in prompts((one, other)[number % 2])
            assert longer not in prompts((one, other)[1 - number % 2])


@pytest.mark.long
@pytest.mark.parametrize("make", [SglangStub, LlamaStub])
def test_an_adapter_goes_where_another_make_has_loaded_it(
    make: type[SglangStub] | type[LlamaStub],
) -> None:
    pytest.importorskip("zmq")
    plain, loaded = make(), make(adapters=("poet",))
    with running(plain, loaded), front(plain.url, loaded.url) as server:
        listed = {each["id"]: each for each in models(server)}
        assert listed["poet"]["parent"] == "m"
        for number in range(4):
            complete(server, model="poet", prompt=prompt_of(number))

        def asked(stub: Any) -> int:
            return sum(
                body.get("lora_path") == "poet" or body.get("lora") == [{"id": 0, "scale": 1.0}]
                for _, body in stub.calls
            )

        assert (asked(plain), asked(loaded)) == (0, 4)


def test_models_of_one_ollama_are_two_models_here() -> None:
    ollama = OllamaStub()
    names = ("llama3.2:latest", "qwen3:4b")
    with running(ollama), front(*(f"{ollama.url}#{name}" for name in names)) as server:
        assert [each["id"] for each in models(server)] == list(names)
        for name in names:
            messages = [{"role": "user", "content": f"of {name}"}]
            answer = post(server, CHAT, model=name, messages=messages, max_tokens=3)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "xxx"
            assert messages in [body["messages"] for body in ollama.bodies(CHAT, name)]
        assert post(server, "/tokenize", model=names[0], prompt="a").status_code == 404


@pytest.mark.long
def test_tensorrt_llms_share_calls_and_keep_tenants_apart(tmp_path: Path) -> None:
    """Each server gets the client's body, with a salt for each tenant; the death of a server costs
    no call."""
    keys = tmp_path / "keys"
    keys.write_text("key-ann ann\nkey-bob bob\n")
    one, other = TensorRtStub(), TensorRtStub()
    words = ("--api-key-file", str(keys))

    def say(server: LocalServer, key: str, text: str, **more: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        login = {"authorization": f"Bearer {key}"}
        return fresh.post(f"{server.url}{CHAT}", json=body | more, headers=login, timeout=60)

    with running(one, other), front(one.url, other.url, words=words) as server:
        for key in ("key-ann", "key-bob", "key-ann"):
            assert say(server, key, f"of {key}").status_code == 200
        sent = [body for stub in (one, other) for body in stub.bodies(CHAT, "m")]
        salts = {
            body["messages"][0]["content"]: body.get("cache_salt")
            for body in sent
            if body["messages"][0]["content"].startswith("of key-")
        }
        assert salts["of key-ann"] and salts["of key-bob"]
        assert salts["of key-ann"] != salts["of key-bob"]
        streamed = say(server, "key-ann", "as a stream", stream=True).text.split("\n\n")
        events = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(texts) == "xxx"
        one.is_dead = True
        for number in range(6):
            assert say(server, "key-bob", f"call {number}").status_code == 200

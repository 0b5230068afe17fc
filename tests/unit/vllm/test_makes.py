"""Tests how servers of other makes are recognised by their answers, and how they are read. Each
stub answers as its documents say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from moonpool.protocol.messages import AttemptId, AttemptSpec, ForwardedCall
from moonpool.protocol.model_offer import ModelOffer
from moonpool.types import FinishReason, SamplingParams, Slo
from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.dialects.find import find_dialect
from moonpool.vllm.dialects.llama_server import LlamaDialect, compute_fields
from moonpool.vllm.dialects.server_dialect import Asked
from moonpool.vllm.facts import VllmFacts
from tests.http_server import QuietHandler, serving

_T = TypeVar("_T")
Answers = dict[str, Any]
OK_TEXT = {"choices": [{"text": "a", "index": 0}]}


def listed(*ids: str, owner: str = "", **more: Any) -> Answers:
    return {"object": "list", "data": [{"id": name, "owned_by": owner, **more} for name in ids]}


@contextmanager
def server(answers: Answers, calls: list[tuple[str, Any]]) -> Iterator[str]:
    """Answers these paths; a list is a stream of events. Paths that take messages refuse `{}`."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._say(answers.get(self.path))

        def do_POST(self) -> None:
            body = self.read_json()
            calls.append((self.path, body))
            found = answers.get(self.path)
            if not body and found is not None:
                self._say({"error": {"message": "empty"}}, 400)
            else:
                self._say(found)

        def _say(self, found: Any, status: int = 200) -> None:
            kind = "text/event-stream" if isinstance(found, list) else "application/json"
            data = json.dumps(found).encode()
            if isinstance(found, list):
                data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in found)
                data += b"data: [DONE]\n\n"
            if isinstance(found, str):
                data = found.encode()
            self.answer(data, 404 if found is None else status, kind)

    with serving(Handler) as place:
        yield f"http://{place}"


def ask(url: str, what: Callable[[VllmClient], Coroutine[Any, Any, _T]]) -> _T:
    async def run() -> _T:
        client = VllmClient(url)
        try:
            return await what(client)
        finally:
            client.close()

    return asyncio.run(run())


def work(call: ForwardedCall | None = None, tenant: str = "", **sampling: Any) -> AttemptSpec:
    return AttemptSpec(
        attempt_id=AttemptId("a"),
        token_ids=(5, 6, 7),
        num_prompt_tokens=3,
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        slo=Slo(1.0, 1.0),
        tenant=tenant,
        use_cache=True,
        timeout_s=9.0,
        call=call,
    )


async def outputs(client: VllmClient, asked: AttemptSpec) -> list[EngineOutput]:
    dialect = await find_dialect(client)
    facts = await dialect.facts()
    return [one async for one in dialect.outputs(SubmitRequest(asked), facts, b"layout")]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OLLAMA: Answers = {
    "/v1/models": listed("llama3.2:latest", "qwen3:4b", owner="library"),
    "/api/version": {"version": "0.20.0"},
    "/api/ps": {"models": [{"name": "qwen3:4b", "context_length": 4096}]},
    "/api/show": {"model_info": {"llama.context_length": 131072}},
    CHAT: OK_TEXT,
    TEXT: OK_TEXT,
}
TENSORRT: Answers = {
    "/health": {},
    "/v1/models": listed("m", owner="tensorrt_llm"),
    "/version": {"version": "1.2"},
    CHAT: OK_TEXT,
    TEXT: OK_TEXT,
}
SGLANG: Answers = {
    "/health": {},
    "/v1/models": listed("m", owner="sglang", max_model_len=4096),
    "/server_info": {
        "model_path": "/models/m",
        "page_size": 64,
        "max_total_num_tokens": 100_000,
        "dp_size": 2,
    },
    "/metrics": 'sglang:prompt_tokens_total{model_name="m"} 90.0\n'
    'sglang:cached_tokens_total{cache_source="device",model_name="m"} 40.0\n',
    CHAT: OK_TEXT,
    TEXT: OK_TEXT,
}


def test_each_make_is_found_and_read() -> None:
    async def look(client: VllmClient) -> tuple[str, Any]:
        dialect = await find_dialect(client)
        return dialect.make, await dialect.facts()

    with server(OLLAMA, []) as url:
        make, facts = ask(f"{url}#qwen3:4b", look)
        assert (make, facts.offer.max_model_tokens, facts.offer.takes) == ("Ollama", 4096, "text")
        assert facts.offer.paths == (TEXT, CHAT) and facts.assumed == "what it has cached"
        assert ask(f"{url}#llama3.2:latest", look)[1].offer.max_model_tokens == 131072
        with pytest.raises(DialectError, match="has 2 models; name one"):
            ask(url, look)
        with pytest.raises(DialectError, match="has no model other"):
            ask(f"{url}#other", look)
    with server(TENSORRT, []) as url:
        make, facts = ask(url, look)
        assert make == "TensorRT-LLM" and "context of 32,768" in facts.assumed
    with server({"/v1/models": listed("x"), CHAT: OK_TEXT}, []) as url:
        make, facts = ask(url, look)
        assert make == "OpenAI-like server" and facts.offer.paths == (CHAT,)
    with server(SGLANG, []) as url:
        make, facts = ask(url, look)
        assert (make, facts.block_tokens, facts.num_blocks) == ("SGLang", 64, 2 * (100_000 // 64))
        assert facts.offer.root == "/models/m" and facts.offer.takes == "either"
    info = SGLANG["/server_info"] | {"page_size": 1}
    with server({**SGLANG, "/server_info": info}, []) as url:
        assert ask(url, look)[1].assumed == "blocks of 16 tokens for its pages of 1"
    other = pytest.raises(DialectError, match="no API that moonpool knows")
    with server({"/health": {}, "/v1/models": "hello"}, []) as url, other:
        ask(url, look)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_tokens_of_sglang(is_incremental: bool) -> None:
    ids = [11, 12, 13, 14]
    events, before = [], 0
    for count, finish in ((1, None), (3, None), (4, {"type": "length"})):
        first = before if is_incremental else 0
        before = count
        meta = {"completion_tokens": count, "finish_reason": finish}
        events.append({"text": "x", "output_ids": ids[first:count], "meta_info": meta})
    calls: list[tuple[str, Any]] = []
    with server({**SGLANG, "/generate": events}, calls) as url:
        found = ask(url, lambda client: outputs(client, work(tenant="t", top_k=0)))
    assert [[token.token_id for token in one.tokens] for one in found] == [[11], [12, 13], [14]]
    assert [one.finish for one in found] == [None, None, FinishReason.LENGTH]
    body = next(body for path, body in calls if path == "/generate")
    assert body["input_ids"] == [5, 6, 7] and len(body["extra_key"]) == 32
    assert body["sampling_params"]["top_k"] == -1


def test_hits_of_sglang() -> None:
    async def count(client: VllmClient) -> Any:
        return await (await find_dialect(client)).counts()

    with server(SGLANG, []) as url:
        assert ask(url, count) == (90.0, 40.0, 0.0)
    with server({key: value for key, value in SGLANG.items() if key != "/metrics"}, []) as url:
        assert ask(url, count) is None


def test_text_goes_as_it_came() -> None:
    calls: list[tuple[str, Any]] = []
    raw = json.dumps({"model": "front", "messages": [], "seed": 3, "cache_salt": "no"}).encode()
    asked = work(ForwardedCall(path=CHAT, body=raw, is_exact=False), tenant="t")
    with server({**OLLAMA, "/v1/models": listed("m")}, calls) as url:
        found = ask(url, lambda client: outputs(client, asked))
    assert found[-1].finish is FinishReason.STOP
    assert calls[-1] == (CHAT, {"model": "m", "messages": [], "seed": 3})


def test_bodies_of_llama_server() -> None:
    fields = compute_fields(work(temperature=0.0, logprobs=0, logit_bias=((7, -1.0),)), 4096)
    assert fields["prompt"] == [5, 6, 7] and fields["n_predict"] == 8 and fields["n_probs"] == 1
    assert fields["logit_bias"] == [[7, -1.0]] and not fields["ignore_eos"]
    assert compute_fields(work(min_tokens=8), 4096)["ignore_eos"]
    for sampling in (
        {"min_tokens": 3},
        {"allowed_token_ids": (1,)},
        {"prompt_logprobs": 1},
        {"logprob_token_ids": (1,), "logprobs": 1},
        {"grammar": "start: /a/"},
    ):
        with pytest.raises(DialectError, match="a llama-server") as refused:
            compute_fields(work(**sampling), 4096)
        assert refused.value.refused


class NeedsKey(QuietHandler):
    def do_GET(self) -> None:
        self.answer(b"{}", 404 if self.path == "/health" else 401)


class Unwell(QuietHandler):
    def do_GET(self) -> None:
        self.answer(json.dumps(listed("m")).encode(), 503 if self.path == "/health" else 200)


def test_text_of_llama_server_without_tokens() -> None:
    events = [
        {"content": "ab", "tokens": [], "tokens_predicted": 2},
        {"content": "c", "tokens": [9], "tokens_predicted": 3},
        {"content": "", "tokens": [], "tokens_predicted": 3, "stop": True, "stop_type": "limit"},
    ]
    answers = {"/completion": events, "/tokenize": {"tokens": [3, 4]}}
    with server(answers, []) as url:
        offer = ModelOffer(root="m", names=("m",), max_model_tokens=64)
        asked = Asked(SubmitRequest(work()), work(), VllmFacts(offer, 16, 4), b"layout", None)

        async def computed(client: VllmClient) -> list[int]:
            found = [one async for one in LlamaDialect(client).computed(asked)]
            return [token.token_id for one in found for token in one.tokens]

        assert ask(url, computed) == [3, 4, 9]


def test_a_server_that_is_not_well_is_told_apart_from_a_wrong_url() -> None:
    with server({"/health": {}, "/v1/models": listed("m", owner="vllm")}, []) as url:
        assert ask(f"{url}/v1", find_dialect).make == "vLLM"
        with pytest.raises(VllmError, match="neither /health nor /v1/models"):
            ask(f"{url}/elsewhere", find_dialect)
    for handler, said in ((NeedsKey, "VLLM_API_KEY"), (Unwell, "its /health says so")):
        with serving(handler) as place, pytest.raises(VllmError, match=said):
            ask(f"http://{place}", find_dialect)

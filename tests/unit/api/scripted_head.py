"""Runs a head that gives the answers that a test has written."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn.server
import uvloop

from moonpool.api.app import http_server, make_app
from moonpool.api.connection.call_log import StreamKeeper
from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.listening import listen
from moonpool.api.connection.tls import TlsFiles
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output
from moonpool.config.slo import SloConfig
from moonpool.protocol.messages import ForwardedCall
from moonpool.text.tokenizer import Tokenizer
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, Request, RequestId, Token, TokenLogprobs

Step = Output | Exception | float | threading.Event
"""A float is a time of silence in seconds. An event means silence until the test sets it."""
Script = Callable[[Request], Sequence[Step]]


def spoken(
    *texts: str,
    finish: FinishReason | None = FinishReason.STOP,
    cached_tokens: int = 0,
    timings_s: dict[str, float] | None = None,
) -> list[Step]:
    """Returns one output per text, with each byte as a token; the last output ends the answer."""
    steps: list[Step] = [
        Output(tokens=tuple(Token(b) for b in text.encode()), cached_tokens=cached_tokens)
        for text in texts
    ]
    if finish is not None:
        steps.append(Output(finish_reason=finish, cached_tokens=cached_tokens, timings_s=timings_s))
    return steps


def one_by_one(data: bytes, *, logprobs: bool = False) -> list[Step]:
    """Returns one output per byte."""
    steps: list[Step] = []
    for byte in data:
        found = TokenLogprobs(-0.5, ((byte, -0.5), (32, -1.5))) if logprobs else None
        steps.append(Output(tokens=(Token(byte, found),)))
    steps.append(Output(finish_reason=FinishReason.LENGTH))
    return steps


class ScriptedHead:
    """Implements `ServingBackend`. A head that records its calls, and the requests whose client
    left early."""

    def __init__(self, script: Script | None = None, tokenizer: Tokenizer | None = None):
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.card = ModelCard(
            model_id="fake",
            created_s=1_700_000_000,
            max_model_tokens=256,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.slo = SloConfig(ttft_s=30.0, tbt_s=0.1)
        self.request_timeout_s = 60.0
        self.now = time.monotonic
        self.script: Script = script or (lambda request: spoken("Hello"))
        self.requests: list[Request] = []
        self.delivered: list[tuple[int, ...] | None] = []
        self.calls: list[ForwardedCall] = []
        self.no_forwarding = ""
        self.aborted: list[str] = []
        self.reasons: list[str] = []  # of those
        self.finished: list[tuple[str, FinishReason, int]] = []
        self.drained: list[tuple[str, float]] = []
        self.kept: list[AsyncGenerator[Output, None]] = []
        self.refused: Counter[str] = Counter()
        self.answered: list[tuple[int, ...]] = []
        self.is_healthy = True
        self.num_drops = self.num_upgrades = 0
        self.num_views = 0
        self.most_views = 1
        self.is_placed = True  # requests count as placed from the beginning
        self.explanations: dict[str, dict[str, Any]] = {}

    def models(self) -> list[ScriptedHead]:
        return [self]

    def options(self, shared: ApiOptions) -> ApiOptions:
        return shared

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        self.calls.append(call)
        return self.submit(request, delivered)

    def why_not_forwarded(self) -> str:
        return self.no_forwarding

    def take_reader(self) -> None:
        return None

    def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        self.num_views += 1
        return {"tenant": tenant, "view": self.num_views}

    def is_stopping(self) -> bool:
        return self.num_views >= self.most_views

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        return [{"key": "ab", "hits": 3}] * min(num_prefixes, 5)

    def note_refused(self, reason: str) -> None:
        self.refused[reason] += 1

    def note_answered(self, lengths: Sequence[int]) -> None:
        self.answered.append(tuple(lengths))

    def drop_cached_blocks(self) -> None:
        self.num_drops += 1

    def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        if instance_id != "prefill-1":
            return f"there is no instance {instance_id!r}; there are: prefill-1"
        self.drained.append((instance_id, within_s))
        return ""

    def upgrade(self) -> None:
        self.num_upgrades += 1

    def submit(
        self, request: Request, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        self.delivered.append(delivered)
        outputs = self._outputs(request)
        # keeps the outputs alive, so that only an explicit close ends them, not garbage collection
        self.kept.append(outputs)
        return outputs

    async def _outputs(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        ended = False
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                if isinstance(step, threading.Event):
                    while not step.is_set():
                        await asyncio.sleep(0.005)
                    continue
                ended = step.finish_reason is not None
                yield step
        finally:
            ended = ended or request.request_id in [name for name, _, _ in self.finished]
            if not ended:
                self.abort(request.request_id)

    def abort(self, request_id: RequestId, reason: str = "abort") -> None:
        self.aborted.append(request_id)
        self.reasons.append(reason)

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        self.finished.append((request_id, reason, num_tokens))
        return {"decode": 0.5}

    def stage(self, request_id: RequestId) -> str:
        return "prefill" if self.is_placed else ""

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.explanations.get(request_id)

    def cluster(self, tenant: str | None = None) -> dict[str, Any]:
        return {"instances": []} if tenant is None else {"instances": [], "tenant": tenant}

    def event_log(self, name: str | None = None) -> bytes | None:
        return b"events" if self._has(name) else None

    def beliefs(self, name: str | None = None) -> dict[str, Any] | None:
        return {"instances": [], "errors": {}} if self._has(name) else None

    def _has(self, name: str | None) -> bool:
        return name in (None, *(model.card.model_id for model in self.models()))

    def server_info(self) -> dict[str, Any]:
        return {"model": "fake"}

    def not_ready(self) -> str:
        return "" if self.is_healthy else "no decode instance is up"

    def metrics_text(self) -> bytes:
        return b"# nothing\n"


def call(
    head: ScriptedHead,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    options: ApiOptions | None = None,
) -> httpx.Response:
    """Sends one call to the application, without a socket."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(head, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://head") as client:
            content = json.dumps(body).encode() if raw is None and body is not None else raw
            all_headers = {"content-type": "application/json", **(headers or {})}
            return await client.request(method, path, content=content, headers=all_headers)

    return asyncio.run(ask())


def chat(head: ScriptedHead, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return call(head, "/v1/chat/completions", body)


def complete(head: ScriptedHead, **fields: Any) -> httpx.Response:
    return call(head, "/v1/completions", {"prompt": "Hi", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the chunks of a stream that ended without an error."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@contextmanager
def served(
    head: ScriptedHead,
    options: ApiOptions | None = None,
    keeper: StreamKeeper | None = None,
    answers: KeptAnswers | None = None,
    tls: TlsFiles | None = None,
) -> Iterator[str]:
    """Serves the application on a real socket; yields its URL."""
    listener = listen("127.0.0.1", 0)
    app = make_app(head, options)
    server = http_server(app, drain_s=1, keeper=keeper, answers=answers, tls=tls)

    def run() -> None:
        uvloop.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run)
    with patch.object(uvicorn.server, "asyncio", _QUICK):
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


_QUICK = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)})
"""Gives uvicorn a quicker clock, because it checks only every 0.1 s whether all connections have
ended."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True

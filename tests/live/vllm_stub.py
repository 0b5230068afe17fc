"""Defines a server that speaks the part of vLLM's HTTP that a head needs, and that waits, refuses,
or dies during a response when a test orders this. The stub makes its answers from the prompt
alone."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_server import QuietHandler

MODEL = "random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=300"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
POOLING = ("/v1/embeddings", "/pooling", "/score", "/v1/rerank")
Body = dict[str, Any]
SILENT_S = 300.0
"""The longest time that the stub waits for a test to let it speak or die."""


def picture(seed: int = 0) -> dict[str, Any]:
    """A part of a message with an image."""
    data = base64.b64encode(bytes([seed]) * 64).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class VllmStub:
    """Serves on a port of its own between `start` and `stop`. `calls` lists the path and the body
    of each call in order of arrival."""

    def __init__(
        self,
        *names: str,
        root: str = MODEL,
        paths: tuple[str, ...] = GENERATING,
        adapters: tuple[str, ...] = (),
        max_model_len: int = 1024,
        num_blocks: int = 4096,
        parses: tuple[str, ...] = (),
        port: int = 0,
        connector: bool = True,
    ) -> None:
        """With `connector`, the stub hands KVCache over if a prefill asks for that."""
        self.connector = connector
        self.names = names or ("m",)
        self.root = root
        self.paths = paths
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.parses = parses  # "tools", "reasoning"
        self.calls: list[tuple[str, Body]] = []
        # the headers of each call, with names in small letters
        self.headers: list[dict[str, str]] = []
        self.noting = threading.Lock()  # keeps `calls` and `headers` in one order
        self.sources: Body | None = None  # of `/kv_event_sources`
        self.num_ranks = 0  # number of data-parallel ranks; 0 if the server does not tell it
        self.stale_ranks = 0  # ranks that `/metrics` names, but which have left
        self.refuses_metrics = False
        self.queries = 0
        self.hit_share = 0.0  # the share of the tokens of all prompts that the stub counts as hits
        self.first_token_s = 0.0
        self.prompt_token_s = 0.0  # seconds per token of a prompt that is given as token ids
        self.gap_s = 0.0
        self.may_speak = threading.Event()  # no response begins before this event
        self.may_speak.set()
        # the number of events after which a stream dies; 0 means before a response
        self.dies_after: int | None = None
        self.may_die = threading.Event()  # a stream that is to die waits for this event
        self.num_deaths = 0  # how many further calls end before a response
        # the status and message with which the stub refuses each call
        self.refuses: tuple[int, str] | None = None
        self._server: ThreadingHTTPServer | None = None
        self.connections: list[socket.socket] = []
        self.port = port
        self.host = "127.0.0.1"  # "" means all addresses of this machine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> VllmStub:
        stub = self

        class Handler(_Handler):
            served = stub

        self._server = ThreadingHTTPServer((self.host, self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Stops like a killed process: connections end at once."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        for sock in self.connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def bodies(self, path: str) -> list[Body]:
        """Returns the bodies of clients' calls, without the calls that measure the server."""
        return [body for where, body in self.calls if where == path and not measures(body)]

    def models(self) -> Body:
        base = {"object": "model", "root": self.root, "max_model_len": self.max_model_len}
        listed = [{"id": name, "parent": None, **base} for name in self.names]
        for name in self.adapters:
            listed.append({"id": name, "parent": self.names[0], "root": f"/adapters/{name}"})
        return {"object": "list", "data": listed}

    def metrics(self) -> str:
        engines = [f'engine="{n}",' for n in range(self.num_ranks + self.stale_ranks)] or [""]
        size = f'block_size="16",num_gpu_blocks="{self.num_blocks}"'
        return "".join(f"vllm:cache_config_info{{{each}{size}}} 1.0\n" for each in engines) + (
            f'vllm:prefix_cache_queries_total{{engine="0"}} {float(self.queries)}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hit_share * self.queries}\n'
        )


def tokens_after(prompt: list[int], count: int) -> list[int]:
    """Returns the answer of every stub to a prompt of token ids, even if the prompt ends with a
    part of the answer."""
    begin = sum(prompt[:50]) + len(prompt)
    return [97 + (begin + number) % 26 for number in range(count)]


def measures(body: Body) -> bool:
    """Whether moonpool measures the server by this call: a call outside the cache, or of many token
    ids."""
    given = body.get("input")
    return len(body.get("cache_salt") or "") == 64 or (isinstance(given, list) and len(given) > 15)


class _Handler(QuietHandler):
    served: VllmStub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(OSError):  # fails if the client has left
            super().handle()

    def setup(self) -> None:
        super().setup()
        self.served.connections.append(self.connection)

    def do_GET(self) -> None:
        stub = self.served
        paths: Body = {path: {} for path in stub.paths}
        answers: dict[str, Callable[[], bytes]] = {
            "/health": lambda: b"",
            "/v1/models": lambda: json.dumps(stub.models()).encode(),
            "/metrics": lambda: stub.metrics().encode(),
            "/openapi.json": lambda: json.dumps({"paths": paths}).encode(),
        }
        if stub.sources is not None:
            answers["/kv_event_sources"] = lambda: json.dumps(stub.sources).encode()
        make = answers.get(self.path)
        if self.path == "/metrics" and stub.refuses_metrics:
            self.answer(b'{"error": "The model is currently scaling."}', 503)
            return
        self.answer(b"" if make is None else make(), 404 if make is None else 200)

    def do_POST(self) -> None:
        stub = self.served
        body = json.loads(self._body())
        with stub.noting:
            stub.calls.append((self.path, body))
            stub.headers.append({name.lower(): value for name, value in self.headers.items()})
        own = not measures(body)
        self.served.queries += len(body.get("prompt", ()))
        if own and (stub.dies_after == 0 or stub.num_deaths):
            stub.num_deaths = max(stub.num_deaths - 1, 0)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        rank = int(self.headers.get("x-data-parallel-rank") or 0)
        if 0 < stub.num_ranks <= rank:
            text = f"data_parallel_rank {rank} is out of range [0, {stub.num_ranks})."
            self.answer(json.dumps({"error": {"message": text, "code": 400}}).encode(), 400)
            return
        if own and stub.refuses is not None:
            status, text = stub.refuses
            self.answer(json.dumps({"error": {"message": text, "code": status}}).encode(), status)
            return
        if self.path not in stub.paths or body.get("model") not in (*stub.names, *stub.adapters):
            self.answer(json.dumps({"error": {"message": "no such model"}}).encode(), 404)
            return
        if body.get("tools") and "tools" not in stub.parses:
            text = '"auto" tool choice requires --enable-auto-tool-choice'
            self.answer(json.dumps({"error": {"message": text, "code": 400}}).encode(), 400)
            return
        longest = len(body.get("prompt", ())) + (body.get("max_tokens") or 1)
        if self.path == GENERATING[0] and longest > stub.max_model_len:
            text = f"This model's maximum context length is {stub.max_model_len} tokens"
            self._whole(400, json.dumps({"error": {"message": text, "code": 400}}).encode())
            return
        time.sleep(stub.first_token_s + stub.prompt_token_s * len(body.get("prompt", ())))
        stub.may_speak.wait(SILENT_S)
        events = [*_parsed(stub, self.path, body), *_events(self.path, body)]
        if body.get("stream"):
            self._stream(events, stub.dies_after if own else None)
        else:
            self.answer(json.dumps(_together(self.path, body, events, stub.connector)).encode())

    def _body(self) -> bytes:
        length = self.headers["content-length"]
        if length is not None:
            return self.rfile.read(int(length))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _stream(self, events: list[Body], dies_after: int | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        for number, line in enumerate([*lines, b"data: [DONE]\n\n"]):
            if number == dies_after:
                self.served.may_die.wait(SILENT_S)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.wfile.flush()
            time.sleep(self.served.gap_s)
        self.wfile.write(b"0\r\n\r\n")


def _parsed(stub: VllmStub, path: str, body: Body) -> Iterator[Body]:
    """Yields events with the results of the server's parsers. The words are such that no other
    parser would return them."""
    if path not in GENERATING[1:]:
        return
    found: Body = {}
    if "reasoning" in stub.parses:
        found["reasoning"] = "r"
    if body.get("tools"):
        found["tool_calls"] = [{"index": 0, "id": "own-1", "function": {"name": "f"}}]
    if found:
        choice = {"index": 0, "delta": found, "finish_reason": None}
        yield {"object": "chat.completion.chunk", "model": body["model"], "choices": [choice]}


def _events(path: str, body: Body) -> Iterator[Body]:
    most = body.get("max_tokens") or body.get("max_completion_tokens") or 4
    if path == "/v1/completions":
        answer = tokens_after(body["prompt"], most)
        for number, token in enumerate(answer):
            finish = "length" if number == most - 1 else None
            yield {"choices": [{"text": chr(token), "token_ids": [token], "finish_reason": finish}]}
        return
    for number in range(most):
        finish = "length" if number == most - 1 else None
        yield {
            "object": "chat.completion.chunk",
            "model": body["model"],
            "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": finish}],
        }


def _together(path: str, body: Body, events: list[Body], connector: bool) -> Body:
    if path in POOLING:
        return {"object": "list", "model": body["model"], "data": [], "usage": {"prompt_tokens": 7}}
    if path != "/v1/completions":
        deltas = [event["choices"][0]["delta"] for event in events]
        message = {"role": "assistant", "content": "".join(d.get("content", "") for d in deltas)}
        message |= next((delta for delta in deltas if "content" not in delta), {})
        usage = {"prompt_tokens": 900, "completion_tokens": len(events)}
        return {"model": body["model"], "choices": [{"message": message}], "usage": usage}
    answer = [event["choices"][0]["token_ids"][0] for event in events]
    choice: Body = {"text": "", "token_ids": answer, "finish_reason": "length"}
    most = body.get("logprobs")
    if most is not None:
        names = [f"token_id:{token}" for token in answer]
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": [-0.5] * len(names),
            "top_logprobs": [{name: -0.5} for name in names],
        }
    if body.get("prompt_logprobs") is not None:
        choice["prompt_logprobs"] = [None] + [
            {str(token): {"logprob": -float(token), "rank": 9}, "7": {"logprob": -0.1, "rank": 1}}
            for token in body["prompt"][1:]
        ]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(answer)}
    whole: Body = {"choices": [choice], "usage": usage}
    if connector and (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        whole["kv_transfer_params"] = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}
    return whole


@contextmanager
def stubs(*made: VllmStub) -> Iterator[tuple[VllmStub, ...]]:
    try:
        yield tuple(stub.start() for stub in made)
    finally:
        for stub in made:
            stub.stop()

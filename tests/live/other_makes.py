"""Stubs of servers of other makes that speak their HTTP, and SGLang's KV events over ZeroMQ. Like
`VllmStub`, they make their answers from the prompt alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec

from tests.http_server import QuietHandler
from tests.live.vllm_stub import MODEL, Body, tokens_after

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_encode = msgspec.msgpack.encode


class ServerStub:
    """Serves on a port of its own. `calls` lists the path and the body of each call in order of
    arrival. If `is_dead` is set, the stub closes each connection before an answer."""

    documents: ClassVar[dict[str, Any]] = {}
    """Maps each path to the stub's answer to GET."""
    paths: tuple[str, ...] = (CHAT, TEXT)
    needs_done = True  # whether a stream ends with [DONE]

    def __init__(self) -> None:
        self.calls: list[tuple[str, Body]] = []
        self.is_dead = False
        stub = self

        class Handler(_Handler):
            served = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def look(self, path: str) -> Any:
        """Returns the answer to GET, or None if the server has no such path."""
        return self.documents.get(path)

    def events(self, path: str, body: Body) -> Iterator[Body]:
        """Yields the events of a stream in the form of OpenAI's API, each with one token."""
        for number in range(body.get("max_tokens") or 4):
            said: Body = {"delta": {"content": "x"}} if path == CHAT else {"text": "x"}
            finish = "length" if number == (body.get("max_tokens") or 4) - 1 else None
            yield {
                "object": "chat.completion.chunk",
                "model": body["model"],
                "choices": [{"index": 0, "finish_reason": finish, **said}],
            }

    def whole(self, path: str, body: Body) -> Body:
        message = {"role": "assistant", "content": "x" * (body.get("max_tokens") or 4)}
        return {"model": body["model"], "choices": [{"index": 0, "message": message}]}

    def bodies(self, path: str, model: str) -> list[Body]:
        return [body for where, body in self.calls if where == path and body.get("model") == model]


class _Handler(QuietHandler):
    served: ServerStub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(OSError):  # fails if the client has left
            super().handle()

    def do_GET(self) -> None:
        found = self.served.look(self.path)
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.answer(data, 404 if found is None else 200)

    def do_POST(self) -> None:
        stub = self.served
        body = self.read_json()
        if self.path not in stub.paths:
            self.answer(b"{}", 404)
            return
        if not body:
            self.answer(b'{"error": {"message": "empty"}}', 400)
            return
        stub.calls.append((self.path, body))
        if stub.is_dead:
            self.close_connection = True
            return
        if not body.get("stream"):
            self.answer(json.dumps(stub.whole(self.path, body)).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in stub.events(self.path, body):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        if stub.needs_done:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


class OllamaStub(ServerStub):
    documents: ClassVar[dict[str, Any]] = {
        "/": "Ollama is running",
        "/v1/models": {
            "object": "list",
            "data": [
                {"id": name, "object": "model", "created": 1, "owned_by": "library"}
                for name in ("llama3.2:latest", "qwen3:4b")
            ],
        },
        "/api/version": {"version": "0.20.0"},
        "/api/ps": {"models": [{"name": "qwen3:4b", "model": "qwen3:4b", "context_length": 4096}]},
    }


class TensorRtStub(ServerStub):
    documents: ClassVar[dict[str, Any]] = {
        "/health": "",
        "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]},
        "/version": {"version": "1.2.0"},
    }


PREFILL_S_PER_TOKEN = 1e-3
"""The stubs' time per prompt token. A server that computes prompts in no time would
give the router no reason for that."""


class SglangStub(ServerStub):
    """Has a radix cache of pages, and publishes and repeats its events as SGLang does: events are
    lists, hashes are integers of 64 bits, and events do not name the salt."""

    paths = (CHAT, TEXT, "/generate")
    page = 16

    def __init__(self, adapters: tuple[str, ...] = ()) -> None:
        import zmq

        super().__init__()
        self._adapters = adapters
        self._cached: set[int] = set()
        self._lock = threading.Lock()
        self._sent: list[bytes] = []
        self.prompt_tokens = self.cached_tokens = 0
        context = zmq.Context.instance()
        self._out, self._again = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket in (self._out, self._again):
            socket.linger = 0
        self.events_at = f"tcp://127.0.0.1:{self._out.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_at = f"tcp://127.0.0.1:{self._again.bind_to_random_port('tcp://127.0.0.1')}"
        self._ends = threading.Event()
        self._repeating = threading.Thread(target=self._repeat, daemon=True)
        self._repeating.start()

    @property
    def place(self) -> str:
        """Returns the address in the form that `--vllm` takes."""
        return f"{self.url},{self.events_at},{self.replay_at}"

    def stop(self) -> None:
        super().stop()
        self._ends.set()
        self._repeating.join()
        self._out.close()

    def look(self, path: str) -> Any:
        own = {"id": "m", "owned_by": "sglang", "root": MODEL, "max_model_len": 1024}
        loaded = [
            {"id": name, "owned_by": "sglang", "root": f"/adapters/{name}", "parent": "m"}
            for name in self._adapters
        ]
        found: dict[str, Any] = {
            "/health": "",
            "/v1/models": {"object": "list", "data": [own, *loaded]},
            "/server_info": {
                "model_path": MODEL,
                "page_size": self.page,
                "max_total_num_tokens": 65_536,
                "dp_size": 1,
                "version": "0.5.23",
            },
            "/metrics": f'sglang:prompt_tokens_total{{model_name="m"}} {self.prompt_tokens}.0\n'
            f'sglang:cached_tokens_total{{model_name="m"}} {self.cached_tokens}.0\n',
        }
        return found.get(path)

    def events(self, path: str, body: Body) -> Iterator[Body]:
        if path != "/generate":
            yield from super().events(path, body)
            return
        prompt, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        with self._lock:
            cached = self._cache(prompt, body.get("extra_key") or "")
        time.sleep(PREFILL_S_PER_TOKEN * (len(prompt) - cached))
        answer = tokens_after(prompt, most)
        for number in range(1, most + 1):
            finish = {"type": "length", "length": most} if number == most else None
            meta = {
                "prompt_tokens": len(prompt),
                "completion_tokens": number,
                "cached_tokens": cached,
                "finish_reason": finish,
            }
            yield {"text": "x" * number, "output_ids": answer[:number], "meta_info": meta}

    def _cache(self, prompt: list[int], salt: str) -> int:
        """Returns the number of cached tokens, and publishes an event for the new pages."""
        parent: int | None = None
        events: list[Any] = []
        num_hits = 0
        for at in range(0, len(prompt) - self.page + 1, self.page):
            tokens = prompt[at : at + self.page]
            name = hash((salt, parent, tuple(tokens)))
            if name in self._cached:
                num_hits += self.page
            else:
                self._cached.add(name)
                events.append(["BlockStored", [name], parent, tokens, self.page, None, "GPU"])
            parent = name
        self.prompt_tokens += len(prompt)
        self.cached_tokens += num_hits
        if events:
            payload = _encode([time.time(), events, 0])
            self._out.send_multipart([b"", len(self._sent).to_bytes(8, "big"), payload])
            self._sent.append(payload)
        return num_hits

    def _repeat(self) -> None:
        while not self._ends.is_set():
            if not self._again.poll(50):
                continue
            client, _, first = self._again.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self._sent)):
                named = number.to_bytes(8, "big")
                self._again.send_multipart([client, b"", named, self._sent[number]])
            self._again.send_multipart([client, b"", b"\xff" * 8, b""])
        self._again.close()


class LlamaStub(ServerStub):
    """Stands for a llama-server with one slot, and with adapters that are loaded but not
    applied."""

    paths = (CHAT, TEXT, "/completion", "/tokenize")
    needs_done = False

    def __init__(self, adapters: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._adapters = adapters

    def look(self, path: str) -> Any:
        found: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {
                "total_slots": 2,
                "model_path": MODEL,
                "default_generation_settings": {"n_ctx": 1024},
            },
            "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "llamacpp"}]},
            "/lora-adapters": [
                {"id": number, "path": f"/adapters/{name}.gguf", "scale": 0.0}
                for number, name in enumerate(self._adapters)
            ],
        }
        return found.get(path)

    def events(self, path: str, body: Body) -> Iterator[Body]:
        if path != "/completion":
            yield from super().events(path, body)
            return
        prompt, most = body["prompt"], body["n_predict"]
        for number, token in enumerate(tokens_after(prompt, most), 1):
            last = {"stop_type": "limit", "timings": {"cache_n": 0}} if number == most else {}
            yield {
                "content": "x",
                "tokens": [token],
                "stop": bool(last),
                "tokens_predicted": number,
                "tokens_evaluated": len(prompt),
                **last,
            }


@contextmanager
def running(*made: ServerStub) -> Iterator[None]:
    try:
        yield
    finally:
        for stub in made:
            stub.stop()

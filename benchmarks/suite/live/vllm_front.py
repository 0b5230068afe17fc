"""Gives two `vllm serve` processes one address. Runs under a vLLM's Python, not ours.

    PEER_PYTHON vllm_front.py PORT turns URL URL             the one with less under way answers
    PEER_PYTHON vllm_front.py PORT pair PREFILL DECODE BOOT  the first computes the prompt, the
                                                             second fetches its KVCache by Mooncake

This program imports nothing of moonpool, and runs until its process is ended.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

JSON = "application/json"


class VllmFront:
    """`targets` are the URLs that answer; only a pair has `prefill` and `boot`."""

    def __init__(self, kind: str, urls: list[str]) -> None:
        self.prefill, self.boot = "", ""
        self.targets = urls
        if kind == "pair":
            self.prefill, target, self.boot = urls
            self.targets = [target]
        self.under_way = dict.fromkeys(self.targets, 0)
        self.engine_id = ""
        self.session: Any = None

    async def open(self, app: Any) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        yield
        await self.session.close()

    async def answer(self, request: Any) -> Any:
        body = await request.json()
        name = {"X-Request-Id": uuid.uuid4().hex}
        prefilling = None
        if self.prefill:
            body, prefilling = await self._begin_prefill(request.path, body, name)
        target = min(self.targets, key=lambda url: self.under_way[url])
        self.under_way[target] += 1
        try:
            return await self._pass_on(request, target, body, name)
        finally:
            self.under_way[target] -= 1
            if prefilling is not None:
                await prefilling

    async def ask(self, request: Any) -> Any:
        """Passes on a request without a body to the first target."""
        async with self.session.get(self.targets[0] + request.path) as found:
            text = await found.read()
            return web.Response(body=text, status=found.status, content_type=JSON)

    async def reset(self, request: Any) -> Any:
        """Resets all targets; succeeds if each has a reset."""
        success = True
        for url in filter(None, (self.prefill, *self.targets)):
            async with self.session.post(url + request.path) as found:
                success &= found.status == 200 and (await found.json())["success"]
        return web.json_response({"success": success})

    async def _begin_prefill(self, path: str, body: Any, name: dict[str, str]) -> Any:
        """Returns the body of the decoder's request, and the task of the prefill."""
        if not self.engine_id:
            async with self.session.get(self.boot + "/query") as found:
                self.engine_id = next(iter((await found.json()).values()))["engine_id"]
        transfer = "transfer-" + name["X-Request-Id"]
        first = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens")}
        first |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer,
        }
        second = body | {
            "kv_transfer_params": {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": self.engine_id,
                "remote_bootstrap_addr": self.boot,
                "transfer_id": transfer,
            }
        }
        return second, asyncio.create_task(self._prefill(path, first, name))

    async def _prefill(self, path: str, body: Any, name: dict[str, str]) -> None:
        async with self.session.post(self.prefill + path, json=body, headers=name) as found:
            if found.status != 200:
                print("a prefill failed:", found.status, await found.text(), file=sys.stderr)
            await found.read()

    async def _pass_on(self, request: Any, target: str, body: Any, name: dict[str, str]) -> Any:
        async with self.session.post(target + request.path, json=body, headers=name) as found:
            kind = found.headers.get("content-type", JSON)
            out = web.StreamResponse(status=found.status, headers={"content-type": kind})
            await out.prepare(request)
            async for piece in found.content.iter_any():
                await out.write(piece)
            await out.write_eof()
            return out


def main() -> None:
    port, kind, *urls = sys.argv[1:]
    front = VllmFront(kind, urls)
    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(front.open)
    app.router.add_post("/v1/completions", front.answer)
    app.router.add_post("/v1/chat/completions", front.answer)
    app.router.add_post("/reset_prefix_cache", front.reset)
    for path in ("/v1/models", "/health"):
        app.router.add_get(path, front.ask)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()

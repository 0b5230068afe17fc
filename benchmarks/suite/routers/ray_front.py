"""Runs under a Python with Ray Serve: Serve's routers before vLLM servers that run already.

    RAY_PYTHON ray_front.py PORT ROUTER SETTINGS URL URL ...

ROUTER is the class of a request router, SETTINGS its keywords in JSON. A deployment has one replica
for each server and passes calls on to it; the ingress reads bodies and asks through a handle, as
Serve LLM's does, so routers see the prompts. Ends when its process is ended.
"""

import json
import os
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.responses import JSONResponse, Response, StreamingResponse

CALLS = 1000
PREFIX_AWARE = "PrefixCacheAffinityRouter"


class VllmReplica:
    """The replica of one server, which its rank selects."""

    def __init__(self, urls: list[str]) -> None:
        rank = serve.get_replica_context().rank
        self._url = urls[getattr(rank, "rank", rank)]
        self._session: Any = None

    async def answer(self, call: SimpleNamespace) -> Any:
        """Yields the HTTP status, then the parts of the answer."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        headers = {"content-type": "application/json"}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=call.body, headers=headers) as found:
            yield str(found.status)
            async for piece in found.content.iter_any():
                yield piece.decode()


class FrontIngress:
    def __init__(self, replicas: Any, urls: list[str], as_text: bool) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._urls, self._as_text = urls, as_text

    async def __call__(self, request: Any) -> Response:
        if request.url.path != "/v1/completions":
            return await self._ask(request.url.path)
        body = await request.body()
        asked = json.loads(body)
        prompt = asked["prompt"]
        if self._as_text and not isinstance(prompt, str):
            prompt = " ".join(map(str, prompt))
        call = SimpleNamespace(prompt=prompt, max_tokens=asked.get("max_tokens", 16), body=body)
        parts = self._replicas.remote(call)
        try:
            status = int(await parts.__anext__())
        except Exception as error:
            status = getattr(error, "status_code", 500)
            return JSONResponse({"error": {"message": str(error), "code": str(status)}}, status)
        return StreamingResponse(parts, status, media_type="text/event-stream")

    async def _ask(self, path: str) -> Response:
        url = self._urls[0] + path
        async with aiohttp.ClientSession() as session, session.get(url) as found:
            text = await found.read()
            return Response(text, found.status, media_type="application/json")


def main() -> None:
    port, router, settings, *urls = sys.argv[1:]
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    config = RequestRouterConfig(
        request_router_class=router, request_router_kwargs=json.loads(settings)
    )
    replicas = serve.deployment(VllmReplica).options(
        num_replicas=len(urls),
        max_ongoing_requests=CALLS,
        request_router_config=config,
        ray_actor_options={"num_cpus": 0.1},
    )
    ingress = serve.deployment(FrontIngress).options(
        max_ongoing_requests=CALLS, ray_actor_options={"num_cpus": 0.1}
    )
    as_text = router.endswith(PREFIX_AWARE)
    serve.run(ingress.bind(replicas.bind(urls), urls, as_text), name="front", route_prefix="/")
    stop = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

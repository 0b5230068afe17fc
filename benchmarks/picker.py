"""Measures CPU time and latency of `moonpool epp`: the wire and the decision, separately and
together.

A client speaks external processing as Envoy does: headers, a body, then a response in parts. The
picker runs in a separate process. The endpoints are instances as in service, but have no servers.

    wire       the gRPC server and the exchange alone: one endpoint, which is known at once decision
    the body read, the Conductor's choice, its bookings and the end, without gRPC whole both, as
    fast as one client can send paced      both, at a rate: the latency from the body to the place

    python benchmarks/picker.py [--endpoints 1000] [--requests 2000] [--rate 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from moonpool.api.serving_backend import ApiOptions, ModelCard
from moonpool.config.tables import Config, EngineConfig, ModelConfig
from moonpool.cost.fitted import FittedCost
from moonpool.discovery.endpoint import Endpoint, Listing
from moonpool.distributions import percentiles
from moonpool.epp.endpoint_worker import EndpointWorker
from moonpool.epp.members import Members
from moonpool.epp.picker import Picked, Picker
from moonpool.epp.routed_call import Route
from moonpool.epp.server import GrpcPort, GrpcServer
from moonpool.gc_tuning import settle_memory, settle_threads
from moonpool.head.models.model_loading import ApiModel
from moonpool.protocol.model_offer import ModelOffer
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason
from moonpool.vllm.dialects.vllm_server import VllmDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.worker import FoundServer

PROMPT_TOKENS = 512
PREFIXES = 200
"""Prompts share their first half with others."""
ANSWER_TOKENS = 16
PARTS = 2
"""The parts of a response. Envoy sends one whenever bytes arrive, so with a token each there are
more."""
AT_A_TIME = 64
COST = FittedCost(
    prefill=(0.02, 1e-4, 0.0, 0.0),
    decode=(0.02, 2e-4, 1e-8),
    shared_memory_bytes_per_s=1e-6,
    network_bytes_per_s=1e-6,
)
OFFER = ModelOffer(root="m", names=("m",), max_model_tokens=8192)
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
PART = EVENT * (ANSWER_TOKENS // PARTS)


class UnmeasuredWorker(EndpointWorker):
    """The instance of an endpoint whose server is always healthy."""

    async def _found(self) -> FoundServer:
        facts = VllmFacts(offer=OFFER, block_tokens=16, num_blocks=1 << 16)
        found = FoundServer(VllmDialect(self._client), facts, incarnation=1)
        found.cost, found.is_measured = COST, True
        return found

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._shared.pause_s)
            if self._joined:
                self._link.send(self._load())

    async def _measure(self, engine: FoundServer) -> None:
        """Does nothing, because the rate of the picker's server is known."""

    async def _profile(self, engine: FoundServer, instance: VllmInstance) -> None:
        """Does nothing, because the profile of the picker's server is known."""


class InstantPicker(Picker):
    """Chooses one endpoint without any decision."""

    async def pick(
        self,
        path: str,
        headers: Mapping[str, str],
        raw: bytes,
        subset: Sequence[str] | None = None,
    ) -> tuple[Route, Picked | None]:
        return Route(Endpoint(name="e", host="127.0.0.1", port=1)), None


async def started(kind: type[Picker], num_endpoints: int) -> Picker:
    config = Config(model=ModelConfig(name=""), engine=EngineConfig(kind="vllm", device="cpu"))
    picker = kind(config, ApiOptions())
    picker.members = Members(picker.shared, 1.0, UnmeasuredWorker)
    card = ModelCard(
        model_id="m", created_s=0, max_model_tokens=8192, vocab_size=259, eos_token_ids=(257,)
    )
    picker.head.served.add("m", ApiModel(card, ByteTokenizer()))
    await picker.start()
    names = [f"e{number}" for number in range(num_endpoints)]
    places = [(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 8000) for i in range(num_endpoints)]
    picker.update(
        Listing(
            endpoints=tuple(
                Endpoint(name=name, host=host, port=port)
                for name, (host, port) in zip(names, places, strict=True)
            )
        )
    )
    await picker.head.wait_for_instances(num_endpoints)
    settle_memory()
    return picker


def body_of(number: int) -> bytes:
    first, second = number % PREFIXES, number % 251
    half = PROMPT_TOKENS // 2
    prompt = [(first * 7 + i) % 250 for i in range(half)] + [
        (second + i) % 250 for i in range(half)
    ]
    asked = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True}
    return json.dumps(asked, separators=(",", ":")).encode()


async def decide(picker: Picker, number: int, raw: bytes) -> None:
    headers = {"x-request-id": f"r{number}"}
    _, picked = await picker.pick("/v1/completions", headers, raw)
    assert picked is not None
    picked.begin()
    for part in range(PARTS):
        await asyncio.sleep(0)
        finish = FinishReason.STOP if part == PARTS - 1 else None
        picked.note(ANSWER_TOKENS // PARTS, finish)
    picked.finish()


async def measure_decisions(num_endpoints: int, num_requests: int) -> dict[str, float]:
    picker = await started(Picker, num_endpoints)
    bodies = [body_of(number) for number in range(num_requests)]
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        async with room:
            await decide(picker, number, bodies[number])

    for first, last in ((0, num_requests // 10), (num_requests // 10, num_requests)):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(number) for number in range(first, last)))
        while picker.head.num_answers:  # noqa: ASYNC110 (a few turns)
            await asyncio.sleep(0.001)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    await picker.stop()
    number = num_requests - num_requests // 10
    return {
        "cpu_ms_each": cpu_s / number * 1e3,
        "decisions_per_cpu_s": number / cpu_s,
        "wall_s": wall_s,
    }


async def measure_served(
    kind: type[Picker], num_endpoints: int, num_requests: int, rate: float
) -> dict[str, float]:
    """`rate` 0 means as fast as the client can send."""
    picker = await started(kind, num_endpoints)
    server = GrpcServer(picker, GrpcPort("127.0.0.1", 0), False)
    await server.start()
    flags = [str(server.port), str(num_requests), str(rate)]
    cpu_s = time.process_time()
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", *flags, stdout=subprocess.PIPE
    )
    out, _ = await client.communicate()
    cpu_s = time.process_time() - cpu_s
    await server.stop(0.1)
    await picker.stop()
    found: dict[str, float] = json.loads(out)
    found["cpu_ms_each"] = cpu_s / num_requests * 1e3
    found["calls_per_cpu_s"] = num_requests / cpu_s
    return found


# The client, which does what Envoy does


def header(key: str, value: str) -> HeaderValue:
    return HeaderValue(key=key, raw_value=value.encode())


async def call(stub: Any, number: int, raw: bytes) -> float:
    """Returns the time from the body to the place."""
    stream = stub.Process()
    headers = [
        header(":method", "POST"),
        header(":path", "/v1/completions"),
        header("content-type", "application/json"),
        header("x-request-id", f"r{number}"),
    ]
    modes = pb.ProtocolConfiguration(
        request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
        response_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
    )
    request = pb.HttpHeaders(headers=HeaderMap(headers=headers))
    await stream.write(pb.ProcessingRequest(request_headers=request, protocol_config=modes))
    began_s = time.perf_counter()
    body = pb.HttpBody(body=raw, end_of_stream=True)
    await stream.write(pb.ProcessingRequest(request_body=body))
    placed = await stream.read()
    seconds = time.perf_counter() - began_s
    assert placed.WhichOneof("response") == "request_headers", placed
    await stream.read()
    told = [header(":status", "200"), header("content-type", "text/event-stream")]
    response = pb.HttpHeaders(headers=HeaderMap(headers=told))
    await stream.write(pb.ProcessingRequest(response_headers=response))
    await stream.read()
    for part in range(PARTS):
        is_last = part == PARTS - 1
        data = PART + b"data: [DONE]\n\n" if is_last else PART
        body = pb.HttpBody(body=data, end_of_stream=is_last)
        await stream.write(pb.ProcessingRequest(response_body=body))
        await stream.read()
    await stream.done_writing()
    await stream.read()
    return seconds


async def client(port: int, num_requests: int, rate: float) -> None:
    bodies = [body_of(number) for number in range(num_requests)]
    room = asyncio.Semaphore(AT_A_TIME if not rate else 4096)
    seconds: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = ExternalProcessorStub(channel)
        began_s = time.perf_counter()

        async def one(number: int) -> None:
            if rate:
                await asyncio.sleep(max(began_s + number / rate - time.perf_counter(), 0.0))
            async with room:
                seconds.append(await call(stub, number, bodies[number]))

        await asyncio.gather(*(one(number) for number in range(num_requests)))
        wall_s = time.perf_counter() - began_s
    found = {f"{p}_ms": 1e3 * each_s for p, each_s in percentiles(seconds, 50, 90, 99).items()}
    print(json.dumps({"wall_s": wall_s, "calls_per_s": num_requests / wall_s, **found}))


def run(num_endpoints: int, num_requests: int, rate: float) -> dict[str, dict[str, float]]:
    def measured(work: Any) -> dict[str, float]:
        found: dict[str, float] = uvloop.run(work)
        return found

    return {
        "wire": measured(measure_served(InstantPicker, 1, num_requests, 0.0)),
        "decision": measured(measure_decisions(num_endpoints, num_requests)),
        "whole": measured(measure_served(Picker, num_endpoints, num_requests, 0.0)),
        "paced": measured(measure_served(Picker, num_endpoints, num_requests, rate)),
    }


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        port, num_requests, rate = sys.argv[2:]
        uvloop.run(client(int(port), int(num_requests), float(rate)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    settle_threads()
    found = run(given.endpoints, given.requests, given.rate)
    for name, figures in found.items():
        print(f"{name:9}", "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

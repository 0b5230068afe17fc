"""Arrangements of vLLM on the same cores as moonpool: one process, two processes, 1 prefill + 1
decode over its Mooncake connector, and two that share a Mooncake Store.

Two processes have half of the cores each, as moonpool's two instances have. All processes that were
started end with the context.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Literal, get_args

import httpx

from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS, VllmServer, vllm_environment
from moonpool.cores import format_cores, parse_cores
from moonpool.types import Struct
from moonpool_lab.demo.local_server import LocalServer, ServerError, free_port
from moonpool_lab.profiling.live_cluster import LiveCluster

Shape = Literal["one", "two", "pair", "pool"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
WORDS: dict[Shape, str] = {
    "one": "vLLM",
    "two": "2 vLLM",
    "pair": "vLLM 1P+1D Mooncake",
    "pool": "2 vLLM, Mooncake Store",
}
FRONT = Path(__file__).with_name("vllm_front.py")
RESET_S, RESET_PAUSE_S = 120.0, 1.0
STORE_BYTES = 1 << 30
"""Memory that each of two vLLMs adds to the Mooncake Store."""


class VllmTarget(Struct, frozen=True):
    """A vLLM: one that runs at `url`, or the Python of its installation to start it with."""

    url: str = ""
    python: str = ""
    cores: str = ""  # such as 0-1; "" means all
    eager: bool = False
    shape: Shape = "one"
    batched_tokens: int = 0  # 0: the cluster's
    kv_tokens: int = 0  # of KVCache per process; 0 means vLLM's choice


@contextmanager
def start_peer(peer: VllmTarget, cluster: LiveCluster, longest_tokens: int) -> Iterator[str]:
    """Returns the URL at which the peer answers. Raises ServerError."""
    if peer.url:
        yield peer.url
        return
    cores = parse_cores(peer.cores) or tuple(sorted(os.sched_getaffinity(0)))
    half = len(cores) // 2
    if peer.shape == "one":
        with _server(peer, cluster, longest_tokens, cores) as server:
            yield server.url
        return
    if not half:
        raise ServerError(f"{WORDS[peer.shape]} needs two cores; --peer-cores has {peer.cores}")
    with ExitStack() as stack:
        roles: tuple[str, str] = ("kv_both", "kv_both")
        beside: dict[str, str] = {}
        kind, boot = "turns", []
        if peer.shape == "pair":
            roles, kind = ("kv_producer", "kv_consumer"), "pair"
            port = free_port()
            beside["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
            boot = [f"http://127.0.0.1:{port}"]
        elif peer.shape == "pool":
            beside["MOONCAKE_CONFIG_PATH"] = stack.enter_context(_store(peer.python))
        urls = [
            stack.enter_context(
                _server(peer, cluster, longest_tokens, own, _transfer(peer.shape, role), beside)
            ).url
            for role, own in zip(roles, (cores[:half], cores[half : 2 * half]), strict=True)
        ]
        front = stack.enter_context(FrontServer(peer.python, [kind, *urls, *boot]))
        yield front.url


def _server(
    peer: VllmTarget,
    cluster: LiveCluster,
    longest_tokens: int,
    cores: tuple[int, ...],
    flags: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> VllmServer:
    options = {
        "--block-size": -(-cluster.block_tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS,
        "--max-model-len": longest_tokens,
        "--max-num-batched-tokens": peer.batched_tokens or max(cluster.chunk_tokens, 1),
        "--max-num-seqs": cluster.max_sequences,
    }
    if peer.kv_tokens:
        options["--num-gpu-blocks-override"] = peer.kv_tokens // int(options["--block-size"])
    flags += ("--enforce-eager",) if peer.eager else ()
    on = format_cores(cores)
    # the server offers the reset
    environment = {"VLLM_SERVER_DEV_MODE": "1"} | dict(environment or {})
    return VllmServer(peer.python, cluster.model, on, options, flags, environment)


def reset_prefix_cache(url: str, wait_s: float = RESET_S) -> None:
    """Empties the prefix cache of a started vLLM, once the answers under way have ended. A Mooncake
    Store keeps its blocks. Raises ServerError."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            found = httpx.post(f"{url}/reset_prefix_cache", timeout=wait_s)
            if found.status_code == HTTPStatus.OK and found.json()["success"]:
                return
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ServerError(f"vLLM did not reset its prefix cache: {error}") from None
        if time.monotonic() > until_s:
            raise ServerError(f"vLLM had not reset its prefix cache after {wait_s:g} s")
        time.sleep(RESET_PAUSE_S)


def _transfer(shape: Shape, role: str) -> tuple[str, ...]:
    if shape == "two":
        return ()
    connector = {"pair": "MooncakeConnector", "pool": "MooncakeStoreConnector"}[shape]
    extra = {"mooncake_protocol": "tcp"} if shape == "pair" else {}
    config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    return ("--kv-transfer-config", json.dumps(config))


class FrontServer(LocalServer):
    def __init__(self, python: str, words: list[str]) -> None:
        super().__init__(())
        self._arguments = [python, str(FRONT), str(self.port), *words]
        self._environment = vllm_environment(python)


@contextmanager
def _store(python: str) -> Iterator[str]:
    """Yields a Mooncake master on the loopback, and the file that tells vLLM of it."""
    command = Path(python).with_name("mooncake_master")
    if not command.exists():
        raise ServerError(
            f"there is no {command}: install mooncake-transfer-engine-non-cuda beside vLLM"
        )
    port = free_port()
    words = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mooncake.json"
        file.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{port}",
                    "protocol": "tcp",
                    "global_segment_size": STORE_BYTES,
                    "local_buffer_size": STORE_BYTES // 2,
                }
            )
        )
        process = subprocess.Popen(
            [str(command), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield str(file)
        finally:
            process.kill()
            process.wait()

"""`serve --vllm-endpoints` adds and removes servers by a file and by DNS while requests run."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forked.commands import LocalServer, run_command
from tests.live.calls import fresh
from tests.live.vllm_stub import VllmStub, stubs, tokens_after
from tests.live.waiting import WAIT_S, wait_until

PROMPT = [(7 * i) % 250 for i in range(200)]
EASY = ["--admission", "none", "--slo-ttft", "600"]


def write(path: Path, *listed: VllmStub) -> None:
    """Replaces the file by a new file, like a tool whose output others read."""
    entries = [
        {"name": f"vllm-{stub.port}", "address": "127.0.0.1", "port": str(stub.port)}
        for stub in listed
    ]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"endpoints": entries}))
    new.replace(path)


def instances(server: LocalServer) -> set[str]:
    described = fresh.get(f"{server.url}/cluster").json()
    return {each["instance_id"] for each in described["instances"]}


def complete(server: LocalServer, **more: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True} | more
    answer = fresh.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def wait_for(server: LocalServer, *listed: VllmStub, wait_s: float = 60.0) -> float:
    """Waits until exactly these servers serve. Returns the seconds that this took."""
    began = time.monotonic()
    wanted = {f"vllm-{stub.port}" for stub in listed}
    while instances(server) != wanted:
        assert time.monotonic() - began < wait_s, (instances(server), wanted)
        time.sleep(0.1)
    return time.monotonic() - began


def long_calls(stub: VllmStub) -> int:
    return sum(body["max_tokens"] == 30 for body in stub.bodies("/v1/completions"))


@pytest.mark.long
@pytest.mark.live
def test_servers_join_and_are_drained_by_a_file_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    first, second = VllmStub("m"), VllmStub("m")
    with stubs(first, second):
        write(path, first)
        with LocalServer(["--vllm-endpoints", str(path), *EASY]) as server:
            wait_for(server, first)
            assert complete(server) == tokens_after(PROMPT, 3)
            write(path, first, second)
            wait_for(server, first, second)
            # with half a file, the head keeps the servers that it knows
            path.write_text("endpoints: [")
            time.sleep(2.5)
            assert len(instances(server)) == 2

            # slow tokens, so that an answer is under way while its server leaves
            first.gap_s = second.gap_s = 0.2
            answers: list[list[int]] = []
            ask = threading.Thread(
                target=lambda: answers.append(complete(server, max_tokens=30)), daemon=True
            )
            ask.start()
            deadline = time.monotonic() + WAIT_S
            while not (long_calls(first) or long_calls(second)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            left = second if long_calls(first) else first
            write(path, left)
            wait_for(server, left)
            ask.join(60)
            assert answers == [tokens_after(PROMPT, 30)]
            assert long_calls(first) + long_calls(second) == 1, "it ended where it began"
            write(path, first, second)
            # until the server, which is held off for a while, serves again
            wait_for(server, first, second)
            assert complete(server) == tokens_after(PROMPT, 3)


@pytest.mark.long
@pytest.mark.live
def test_a_front_starts_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: []")
    stub = VllmStub("m")
    with stubs(stub):
        server = LocalServer(["--vllm-endpoints", str(path), *EASY])
        said = f"{path} lists no server: is it the right name"

        def write_once_said() -> None:
            wait_until(lambda: any(said in line for line in server.log_lines()))
            write(path, stub)

        writer = threading.Thread(target=write_once_said)
        writer.start()
        with server:
            wait_for(server, stub)
            assert complete(server) == tokens_after(PROMPT, 3)
        writer.join()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("none.yaml", "cannot read none.yaml"),
        ("http://a", "is no source"),
        ("dns://a", "is no source"),
        ("srv://a:80", "is no source"),
        ("dns://a:80?role=cook", "is no source"),
    ],
)
def test_a_source_that_is_none_is_one_line(source: str, said: str) -> None:
    done = run_command("serve", "--vllm-endpoints", source)
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr
    both = run_command("serve", "--vllm-endpoints", source, "--vllm", "http://127.0.0.1:1")
    assert "vllm.endpoints" in both.stderr


# The same with DNS:


@contextmanager
def nameserver(records: list[tuple[str, int]]) -> Iterator[int]:
    """Answers every query for SRV records with the present value of `records`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    query, client = sock.recvfrom(4096)
                except TimeoutError:
                    continue
                head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(records), 0, 0)
                answer = head + query[12:]
                for host, port in records:
                    target = b"".join(bytes([len(p)]) + p.encode() for p in host.split(".")) + b"\0"
                    data = struct.pack(">HHH", 0, 0, port) + target
                    answer += b"\xc0\x0c" + struct.pack(">HHIH", 33, 1, 1, len(data)) + data
                sock.sendto(answer, client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            ended.set()
            thread.join()

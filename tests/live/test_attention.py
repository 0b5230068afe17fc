"""Runs attention workers as processes. Answers are the same as without attention workers, even when
a worker or its owner dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import make_certificates
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import wait_until_gone
from tests.live.waiting import WAIT_S, wait_until, wait_until_idle

LONG = {"prompt": [9, 8] * 300, "max_tokens": 700, "temperature": 1, "seed": 5, "ignore_eos": True}
MEDIUM = LONG | {"max_tokens": 200}
SHORT = {"prompt": [7] * 40, "max_tokens": 200, "temperature": 1, "seed": 6, "ignore_eos": True}


def ask(client: httpx.Client, body: dict[str, Any]) -> str:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def ask_together(client: httpx.Client, bodies: list[dict[str, Any]]) -> list[str]:
    answers = [""] * len(bodies)

    def one(index: int) -> None:
        answers[index] = ask(client, bodies[index])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def without_workers(*bodies: dict[str, Any]) -> list[str]:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        return [ask(client, body) for body in bodies]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Returns long and short answers of a cluster without attention workers."""
    return without_workers(LONG, SHORT)


@pytest.fixture(scope="module")
def medium() -> list[str]:
    return without_workers(MEDIUM, SHORT)


def attention_pids(server: LocalServer) -> dict[str, int]:
    """Returns the names and process ids of the server's attention workers."""
    cluster = fresh.get(f"{server.url}/cluster").json()
    assert all(w["owner"] == "decode-0" for w in cluster["attention"])
    return {w["name"]: w["pid"] for w in cluster["attention"]}


def counters_of(client: httpx.Client, name: str) -> dict[str, float]:
    instances = client.get("/cluster").json()["instances"]
    return next((i["counters"] for i in instances if i["instance_id"] == name), {})


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_answers_are_those_without_attention_workers(count: int, medium: list[str]) -> None:
    command = [MODEL, "--prefill", "1", "--decode", "1", "--attention", str(count), *SMALL]
    with LocalServer(command) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        bodies = [MEDIUM, SHORT, MEDIUM | {"prompt": [3] * 200}, SHORT]
        assert ask(client, MEDIUM) == medium[0]
        assert ask(client, MEDIUM) == medium[0]  # the second answer reads cached blocks
        together = ask_together(client, bodies)
        assert [together[i] for i in (0, 1, 3)] == [medium[0], medium[1], medium[1]]
        assert len(attention_pids(server)) == count
        pids = [server.pid, *server.worker_pids(), *attention_pids(server).values()]
        assert server.stop(signal.SIGINT) == 0
        assert wait_until_gone(pids) == []


@pytest.mark.long
def test_over_tcp(expected: list[str], tmp_path: Path) -> None:
    config = tmp_path / "tcp.toml"
    config.write_text("[network]\nuse_shared_memory = false\n")
    command = [MODEL, "--config", str(config), "--attention", "2", *SMALL]
    with LocalServer(command) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask_together(client, [LONG, SHORT]) == expected


@pytest.mark.long
def test_with_certificates(expected: list[str], tmp_path: Path) -> None:
    files = make_certificates(tmp_path, "ours", "all")
    names = ("certfile", "keyfile", "ca_certs")
    lines = [f'{name} = "{path}"' for name, path in zip(names, files, strict=True)]
    config = tmp_path / "tls.toml"
    config.write_text("\n".join(["[network]", "use_shared_memory = false", "[tls]", *lines]))
    command = [MODEL, "--config", str(config), "--attention", "2", *SMALL]
    with LocalServer(command) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask_together(client, [LONG, SHORT]) == expected
        wait_until(lambda: counters_of(client, "decode-0").get("tls_received_bytes"))
        assert not counters_of(client, "decode-0").get("tcp_received_bytes")
        pid = attention_pids(server)["attention-0"]
        os.kill(pid, signal.SIGKILL)
        assert ask_together(client, [LONG, SHORT]) == expected


def while_answering(
    client: httpx.Client, body: dict[str, Any], then: Callable[[], None], copies: int = 2
) -> list[str]:
    """Returns answers to `copies` of the request. While the answers run, the test does something to
    the cluster."""
    answers: list[str] = []
    done = threading.Thread(target=lambda: answers.extend(ask_together(client, [body] * copies)))
    done.start()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        text = client.get("/metrics").text
        lines = [line for line in text.splitlines() if "generation_tokens_total" in line]
        if any(float(line.split()[-1]) > 60 for line in lines if not line.startswith("#")):
            break
        time.sleep(0.005)
    then()
    done.join(60)
    return answers


@pytest.mark.long
def test_killed_attention_workers_cost_no_answer(expected: list[str]) -> None:
    command = [MODEL, "--prefill", "1", "--decode", "1", "--attention", "2", *SMALL]
    with LocalServer(command) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        before = attention_pids(server)

        def kill_one() -> None:
            os.kill(before["attention-0"], signal.SIGKILL)

        assert while_answering(client, LONG, kill_one) == [expected[0]] * 2
        assert counters_of_soon(client, "decode-0", "lost_arenas") == 1
        assert restarted(server, before, "attention-0")
        wait_until_idle(client)  # The owner has the KVCache back.
        os.kill(attention_pids(server)["attention-1"], signal.SIGKILL)
        assert ask_together(client, [LONG, SHORT]) == expected


def counters_of_soon(client: httpx.Client, name: str, counter: str) -> float:
    return wait_until(lambda: counters_of(client, name).get(counter))


def restarted(server: LocalServer, before: dict[str, int], name: str) -> bool:
    return wait_until(lambda: attention_pids(server).get(name, before[name]) != before[name])


@pytest.mark.long
def test_a_killed_model_worker_loses_no_blocks(expected: list[str]) -> None:
    """The successor of a dead owner finds the complete blocks, and the answer continues."""
    command = [MODEL, "--prefill", "1", "--decode", "1", "--attention", "2", *SMALL]
    with LocalServer(command) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask(client, LONG) == expected[0]
        cluster = client.get("/cluster").json()["instances"]
        decode = next(i for i in cluster if i["role"] == "decode")
        keepers = attention_pids(server)
        os.kill(decode["pid"], signal.SIGKILL)
        again = wait_for_successor(client, decode["pid"])
        assert attention_pids(server) == keepers
        # These are all blocks of the prompt and the answer but the last block.
        assert again["indexed_blocks"] >= (600 + 700) // 16 - 2
        assert ask(client, LONG) == expected[0]


def wait_for_successor(client: httpx.Client, former_pid: int) -> dict[str, Any]:
    def successor() -> dict[str, Any] | None:
        for instance in client.get("/cluster").json()["instances"]:
            is_next = instance["role"] == "decode" and instance["pid"] != former_pid
            if is_next and instance["indexed_blocks"]:
                return dict(instance)
        return None

    return wait_until(successor, "no decode instance came back with blocks")


@pytest.mark.long
def test_attention_workers_that_do_not_fit_are_refused() -> None:
    for arguments, words in (
        (["--decode", "2", "--attention", "3"], "multiple of the 2 instances"),
        (["--attention", "2", "--role-balance", "switch"], "conductor.role_balance"),
        (["--attention", "2", "--device", "cuda"], "engine.device"),
        (["--attention-partition", "head"], "cluster.attention must be > 0"),
        (["--attention", "2", "--attention-partition", "tokens", "--block-size", "48"], "2048"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moonpool", "serve", "--port", "0", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert words in done.stderr
        assert "Traceback" not in done.stderr

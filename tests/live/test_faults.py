"""Kills processes: answers stay right, errors are clear, and no process or memory is left
behind."""

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

from moonpool_lab.demo import local_server
from moonpool_lab.demo.local_server import free_port, is_alive
from tests.forked.commands import LocalServer
from tests.forked.commands import run_command as run_forked
from tests.live.conftest import MODEL, SMALL
from tests.live.waiting import WAIT_S
from tests.processes import children_of

LONG = {"prompt": [9] * 600, "max_tokens": 600, "temperature": 1, "seed": 5, "ignore_eos": True}


def wait_until_gone(pids: list[int], wait_s: float = WAIT_S) -> list[int]:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


def shared_memory_names() -> set[str]:
    """Returns all names in shared memory except the names that libraries of other processes
    create."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(("tmp", "sem.mp-"))}


def test_killed_workers_cost_no_answer_and_ctrl_c_leaves_nothing() -> None:
    before = shared_memory_names()
    arguments = [MODEL, "--prefill", "2", "--decode", "2", *SMALL]
    # starts a new interpreter, as in production
    with local_server.LocalServer(arguments) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        for role in ("decode", "prefill"):
            got = answer_while_killing(client, role)
            assert got["choices"][0]["text"] == expected, role
        assert wait_for_instances(client, 4)
        pids = [server.pid, *server.worker_pids()]
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        status = server.stop(signal.SIGINT)
        assert status == 0
        assert wait_until_gone(pids) == []
    assert shared_memory_names() <= before


def answer_while_killing(
    client: httpx.Client,
    role: str,
    victim: Callable[[int], int] = lambda pid: pid,
    body: dict[str, Any] = LONG,
) -> Any:
    """Sends the `body`, and kills the instance of `role` that serves it, or the `victim`, another
    process of that instance."""
    got: dict[str, Any] = {}

    def ask() -> None:
        headers = {"X-Request-Id": f"killed-{role}"}
        got.update(client.post("/v1/completions", json=body, headers=headers).json())

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    killed = False
    while time.monotonic() < deadline and not killed:
        explained = client.get(f"/explain/killed-{role}").json()
        if explained.get("generated_tokens", 0) > 20:
            name = explained[f"{role}_instance"]
            instances = client.get("/cluster").json()["instances"]
            pid = next(i["pid"] for i in instances if i["instance_id"] == name)
            os.kill(victim(pid), signal.SIGKILL)
            killed = True
        time.sleep(0.005)
    thread.join(60)
    assert killed, explained
    return got


def wait_for_instances(client: httpx.Client, count: int, wait_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if len(client.get("/cluster").json()["instances"]) == count:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.long
def test_a_killed_head_takes_its_workers_along() -> None:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        pids = server.worker_pids()
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until_gone(pids) == []


@pytest.mark.long
def test_ctrl_c_while_starting_leaves_nothing() -> None:
    command = [sys.executable, "-m", "moonpool", "serve", "--port", str(free_port())]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + WAIT_S
    while not (started := children_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) >= 1
    time.sleep(0.5)
    started = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert wait_until_gone(started) == []


def run_command(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    if arguments[0] == "serve" and "--port" not in arguments:
        # any free port, because another program may use port 8000
        arguments = (*arguments, "--port", "0")
    return run_forked(*arguments, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["serve", "random:m7"], ["random:m7"]),
        (["serve", "--prefill", "0"], ["prefill"]),
        (["serve", "--block-size", "17"], ["block_tokens", "16"]),
        (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["serve", "--max-model-len", "99999999"], ["99999999"]),
        (["worker", "--role", "decode", "--head", "nonsense"], ["HOST:PORT"]),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], words: list[str]) -> None:
    done = run_command(*arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), last


def test_a_taken_port_is_named() -> None:
    port = free_port()
    with __import__("socket").create_server(("127.0.0.1", port)):
        done = run_command("serve", MODEL, "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_too_little_memory_says_how_much_is_needed() -> None:
    done = run_command("serve", MODEL, "--kv-tokens", "10000000000", "--port", str(free_port()))
    assert done.returncode == 1
    assert "GiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[pool]\nblok_tokens = 64\n")
    done = run_command("serve", MODEL, "--config", str(config))
    assert done.returncode == 1
    assert "pool.blok_tokens" in done.stderr
    assert "block_tokens" in done.stderr


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def child_of(pid: int, command: str) -> int:
    """Waits for a child with this command line."""
    by_s = time.monotonic() + WAIT_S
    while not (found := [p for p in children_of(pid) if command_of(p) == command]):
        assert time.monotonic() < by_s, f"no {command}"
        time.sleep(0.05)
    return found[0]


def layout_of(pid: int) -> str:
    """Returns the address of the kernel's page. The kernel chooses it at random when a program
    starts, and forks keep it."""
    (line,) = (x for x in Path(f"/proc/{pid}/maps").read_text().splitlines() if "[vdso]" in x)
    return line.split()[0]


@pytest.mark.long
def test_a_worker_that_dies_a_second_after_the_fork_server_is_forked_from_the_spare() -> None:
    body = LONG | {"max_tokens": 3000}
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        fork_server = child_of(server.pid, "moonpool fork server")
        spare = child_of(server.pid, "moonpool spare fork server")
        before = {i["instance_id"]: i["pid"] for i in server.instances()}
        layout = layout_of(fork_server)

        def with_its_fork_server(pid: int) -> int:
            os.kill(fork_server, signal.SIGKILL)
            assert wait_until_gone([fork_server]) == []
            time.sleep(1.0)
            assert client.get("/explain/killed-decode").json()["generated_tokens"] < 3000
            return pid

        got = answer_while_killing(client, "decode", with_its_fork_server, body)
        assert got["choices"][0]["text"] == expected
        assert wait_for_instances(client, 2)
        after = {i["instance_id"]: i["pid"] for i in server.instances()}
        assert after["prefill-0"] == before["prefill-0"] and after["decode-0"] != before["decode-0"]
        assert layout_of(after["decode-0"]) == layout, "no new interpreter"
        next_spare = child_of(server.pid, "moonpool spare fork server")
        assert child_of(server.pid, "moonpool fork server") == spare != next_spare
        assert server.stop(signal.SIGINT) == 0
        assert wait_until_gone([spare, next_spare, *after.values()]) == []


@pytest.mark.long
def test_workers_come_back_without_their_fork_server_which_comes_back_too() -> None:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        fork_server = child_of(server.pid, "moonpool fork server")
        spare = child_of(server.pid, "moonpool spare fork server")
        pids = {instance["instance_id"]: instance["pid"] for instance in server.instances()}
        first, decode = pids["prefill-0"], pids["decode-0"]
        assert " -m moonpool worker --role prefill --name prefill-0 " in command_of(first)
        for pid in (spare, fork_server, first):
            os.kill(pid, signal.SIGKILL)
            assert wait_until_gone([pid]) == []
        deadline = time.monotonic() + WAIT_S
        while first in (now := server.worker_pids()) or len(now) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        got = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        assert got == expected
        assert decode in now, "the death of the fork server ends no worker"

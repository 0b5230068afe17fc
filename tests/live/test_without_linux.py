"""Runs a server as on a kernel other than Linux: functions that only Linux has are hidden from all
processes.

The test shows that no part needs them. It does not show that the rest of macOS behaves like Linux.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool_lab.demo.local_server import LocalServer
from tests.live.calls import fresh
from tests.live.test_faults import wait_until_gone
from tests.live.vllm_stub import VllmStub, stubs, tokens_after
from tests.live.waiting import WAIT_S
from tests.processes import children_of

pytestmark = pytest.mark.live

HIDDEN = """
import builtins, ctypes, errno, os, resource, select, signal, socket

for module, names in {
    os: ("memfd_create", "MFD_CLOEXEC", "sched_getaffinity", "sched_setaffinity", "pidfd_open",
         "eventfd", "posix_fallocate", "P_PIDFD"),
    signal: ("pidfd_send_signal",),
    select: ("epoll",),
    socket: ("TCP_INFO", "SO_PEERCRED", "MSG_CMSG_CLOEXEC"),
}.items():
    for name in names:
        vars(module).pop(name, None)

pair, opened, limit, library = socket.socketpair, builtins.open, resource.setrlimit, ctypes.CDLL


def socketpair(family=socket.AF_UNIX, kind=socket.SOCK_STREAM, proto=0):
    if kind == socket.SOCK_SEQPACKET:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
    return pair(family, kind, proto)


def open_(file, *arguments, **named):
    if isinstance(file, str) and file.startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", file)
    return opened(file, *arguments, **named)


def setrlimit(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    limit(kind, limits)


class Library(library):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


socket.socketpair, builtins.open, resource.setrlimit = socketpair, open_, setrlimit
ctypes.CDLL = Library
"""
PROMPT = [(7 * i) % 250 for i in range(200)]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns environment variables that hide Linux's own calls from a process."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDDEN)
    return {"PYTHONPATH": str(folder)}


def test_it_simulates_and_plans(elsewhere: dict[str, str], tmp_path: Path) -> None:
    for line in (
        "trace generate --requests 30 -o trace.jsonl",
        "trace info trace.jsonl",
        "simulate --trace trace.jsonl --report run.html --json run.json",
        "plan --trace trace.jsonl --slo-ttft 30 --slo-tbt 0.2 --runs 12",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moonpool", *line.split()],
            cwd=tmp_path,
            env=os.environ | elsewhere,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def server(elsewhere: dict[str, str]) -> Iterator[LocalServer]:
    stub = VllmStub("m")
    with (
        stubs(stub),
        LocalServer(["--vllm", stub.url, "--admission", "none"], environment=elsewhere) as server,
    ):
        yield server


@pytest.mark.long
def test_a_front_outlives_its_head_and_no_process_the_supervisor(server: LocalServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    answer = fresh.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == tokens_after(PROMPT, 3)
    head = fresh.get(f"{server.url}/cluster", timeout=60).json()["head"]["pid"]
    os.kill(head, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while True:
        again = fresh.post(f"{server.url}/v1/completions", json=body, timeout=60)
        if again.status_code == 200:
            break
        assert time.monotonic() < deadline, again.text
        time.sleep(0.2)
    assert again.json()["choices"] == answer.json()["choices"]
    pids = children_of(server.pid)
    assert len(pids) >= 2
    os.kill(server.pid, signal.SIGKILL)
    assert wait_until_gone(pids) == []

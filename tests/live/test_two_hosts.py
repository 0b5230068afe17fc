"""Runs two hosts with a network between them that is slow, loses packets, and is cut for a
while."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.live.wire import HOSTS, Wire, missing, two_hosts

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
WAIT_S = 180.0

pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(missing()), reason=missing())]


def blocks() -> dict[str, list[str]]:
    """Returns the lines of the page's quick start for two hosts, by machine."""
    text = PAGE.read_text().partition("## Two machines by hand")[2]
    found: dict[str, list[str]] = {}
    match = re.search(r"```sh\n(.*?)```", text, re.S)
    assert match is not None
    for line in match[1].splitlines():
        if line.startswith("# "):
            key = line[2:].partition(":")[0]
            found[key] = []
        elif line:
            found[key].append(line)
    return found


class Shell:
    """Runs a shell on one host; its processes end with the shell."""

    def __init__(self, wire: Wire, host: int, log: Path) -> None:
        bin_folder = log.parent / "bin"
        bin_folder.mkdir(exist_ok=True)
        command = bin_folder / "moonpool"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moonpool "$@"\n')
        command.chmod(0o755)
        environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
        environment |= {"OMP_NUM_THREADS": "1"}
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            wire.line(host, ["bash"]),
            stdin=subprocess.PIPE,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def type(self, lines: list[str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def end(self) -> None:
        self.type(["kill -KILL $(jobs -p)", "exit"])
        self.process.wait(60)
        self._file.close()


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Wire, Shell, Shell]]:
    """Runs the cluster of the page, without the request of the page's last line."""
    lines = blocks()
    with two_hosts() as wire:
        first, second = (Shell(wire, host, folder / f"host{host}.log") for host in (0, 1))
        try:
            first.type([*lines["both"], *lines["first"]])
            second.type([*lines["both"], *lines["second"][:-1]])
            yield wire, first, second
        finally:
            for shell in (first, second):
                shell.end()


def ask(wire: Wire, path: str, body: dict[str, Any] | None = None, host: int = 1) -> Any:
    """Sends a call to the head from a host. Returns None unless the answer has status 200."""
    words = ["curl", "-sf", "--max-time", "90", f"http://{HOSTS[0]}:8000{path}"]
    if body is not None:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(wire.line(host, words), capture_output=True, timeout=120)
    return json.loads(done.stdout) if done.returncode == 0 and done.stdout else None


def wait_for(wire: Wire, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        described = ask(wire, "/cluster", host=0)
        if described is not None and len(described["instances"]) == number:
            return
        assert time.monotonic() < deadline, described
        time.sleep(0.5)


COMPLETION = {"prompt": list(range(40, 240)), "max_tokens": 12, "seed": 1}


def test_the_quick_start_for_two_hosts_as_it_is_written(tmp_path: Path) -> None:
    last = blocks()["second"][-1]
    with cluster(tmp_path) as (wire, _, second):
        wait_for(wire, 2)
        second.type([last])
        deadline = time.monotonic() + WAIT_S
        while b'"text"' not in second.log.read_bytes():
            assert time.monotonic() < deadline, second.log.read_text()
            time.sleep(0.2)


@pytest.mark.long
def test_a_slow_wire_with_losses_and_a_cut_that_heals(tmp_path: Path) -> None:
    with cluster(tmp_path) as (wire, _, second):
        wait_for(wire, 2)
        answer = ask(wire, "/v1/completions", COMPLETION)
        text = answer["choices"][0]["text"]
        wire.rate, wire.delay_s, wire.loss = 4e6, 0.02, 0.01
        for _ in range(3):
            again = ask(wire, "/v1/completions", COMPLETION)
            assert again["choices"][0]["text"] == text
        assert wire.num_lost
        wire.is_cut = True
        wait_for(wire, 1)  # until the head has dropped the decode instance, which is silent
        assert ask(wire, "/ready", host=0) is None
        wire.is_cut = False
        wait_for(wire, 2)
        healed = ask(wire, "/v1/completions", COMPLETION)
        assert healed["choices"][0]["text"] == text
        assert "Traceback" not in second.log.read_text()

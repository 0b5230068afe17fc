"""Every process but the supervisor is killed or stopped at random: every stream ends right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from moonpool.demo.local_server import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import children_of, command_of, shared_memory_names, wait_until_gone
from tests.live.test_head_death import Body, Streams, ask, bodies

RUN_S = 60.0
STREAMS_S = 240.0
STOPPED_SHARE = 0.25
LONGEST_STOP_S = 3.0


def kind_of(pid: int) -> str:
    """`head`, `fork server`, or the role of a worker; empty if the process has just ended."""
    try:
        command = command_of(pid)
    except OSError:
        return ""
    if "head-process" in command:
        return "head"
    if command == "moonpool fork server" or " fork-server " in command:
        return "fork server"
    words = command.split()
    return words[words.index("--role") + 1] if "--role" in words else ""


def victims(server: LocalServer) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid in children_of(server.pid):
        kind = kind_of(pid)
        if kind:
            found.setdefault(kind, []).append(pid)
    return found


def stop_for(pid: int, seconds: float) -> None:
    """Lets a process stand still for so long."""

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, go_on).start()


def wait_until_begun(streams: Streams, numbers: set[int]) -> None:
    """A call that the head has not read completely ends with the head."""
    deadline = time.monotonic() + STREAMS_S
    while not numbers <= streams.begun and streams.are_running:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrangement", "kinds"),
    [
        (["--prefill", "1", "--decode", "1"], {"head", "fork server", "prefill", "decode"}),
        (["--mixed", "2"], {"head", "fork server", "mixed"}),
    ],
    ids=["1P+1D", "2M"],
)
def test_no_death_but_the_supervisors_costs_an_answer(
    arrangement: list[str], kinds: set[str]
) -> None:
    before, drawn = shared_memory_names(), random.Random(17)
    killed: dict[str, int] = {}
    with LocalServer([MODEL, *arrangement, *SMALL, "--admission", "none"]) as server:
        calls: list[tuple[str, Body]] = bodies()
        expected = [ask(server.url, path, body) for path, body in calls]
        streamed = {number for number, (_, body) in enumerate(calls) if body["stream"]}
        until_s = time.monotonic() + RUN_S
        while time.monotonic() < until_s or not kinds <= killed.keys():
            streams = Streams(server.url, calls)
            wait_until_begun(streams, streamed)
            for _ in range(drawn.randrange(2, 6)):
                time.sleep(drawn.random())
                found = victims(server)
                if not streams.are_running or not found:
                    break
                kind = drawn.choice(sorted(found))
                pid = drawn.choice(found[kind])
                if drawn.random() < STOPPED_SHARE:
                    stop_for(pid, drawn.random() * LONGEST_STOP_S)
                    kind = f"{kind} stopped"
                else:
                    os.kill(pid, signal.SIGKILL)
                killed[kind] = killed.get(kind, 0) + 1
            streams.join()
            assert streams.errors == [], killed
            assert [streams.got[number] for number in range(len(calls))] == expected, killed
        all_pids = [*children_of(server.pid), server.pid]
        assert server.stop() == 0
    print(f"killed: {killed}")
    assert wait_until_gone(all_pids) == []
    assert shared_memory_names() == before

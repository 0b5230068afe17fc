"""Tests workers that are forked from a fork server: their parent, the report of their end, and
their fate when the fork server or the head is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from moonpool.head.fork_server import open_fork_server
from moonpool_lab.demo.local_server import is_alive

HEAD = """
import asyncio, json, os, signal, sys, time
import uvloop
from moonpool.children.parent import end_with
from moonpool.children.stopped import is_stopped
from moonpool.head.fork_server import ForkServerError, open_fork_server

def work(line):
    match line:
        case ["end", code]:
            sys.exit(int(code))
        case ["stay", path]:
            end_with(os.getppid())
            stdin = os.readlink("/proc/self/fd/0")
            fds = len(os.listdir("/proc/self/fd"))
            told = {"parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
                    "word": os.environ["WORD"], "stdin": stdin, "fds": fds}
            with open(path + ".part", "w") as file:
                json.dump(told, file)
            os.rename(path + ".part", path)
            time.sleep(60)

fork_server = open_fork_server({"WORD": "salt"}, work)
said = {"head": os.getpid(), "fork_server": fork_server.pid}

async def told_by(path):
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    with open(path) as file:
        return json.load(file)

async def main():
%s
    print(json.dumps(said), flush=True)

uvloop.run(main())
"""


def start_head(body: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a process with one thread, because pytest's own process has several."""
    script = HEAD % "\n".join(f"    {line}" for line in body.strip().splitlines())
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_head(body: str, *arguments: str) -> dict[str, Any]:
    process = start_head(body, *arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == "", err
    found: dict[str, Any] = json.loads(out)
    return found


def until(holds: Any) -> bool:
    by_s = time.monotonic() + 60
    while not holds() and time.monotonic() < by_s:
        time.sleep(0.01)
    return bool(holds())


def test_workers_are_the_head_s_children_and_their_end_is_told(tmp_path: Any) -> None:
    found = run_head(
        """
workers = await asyncio.gather(*(fork_server.fork(["end", str(code)]) for code in range(12)))
said["codes"] = [await worker.wait() for worker in workers]
said["pids"] = [worker.pid for worker in workers]
stays = await fork_server.fork(["stay", sys.argv[1]])
said["told"] = await told_by(sys.argv[1])
stays.kill()
said["killed"] = [await stays.wait(), await stays.wait(), stays.returncode]
stays.kill()
await fork_server.close()
""",
        str(tmp_path / "told"),
    )
    assert found["codes"] == list(range(12)) and len(set(found["pids"])) == 12
    assert found["killed"] == [-signal.SIGKILL] * 3
    told = found["told"]
    assert told["parent"] == found["head"] and told["session"] == told["pid"]
    assert told["word"] == "salt" and told["stdin"] == "/dev/null"
    assert told["fds"] <= 4, "nothing of the head's is kept open"
    assert not is_alive(found["fork_server"]), "closed"


def test_workers_outlive_the_fork_server(tmp_path: Any) -> None:
    found = run_head(
        """
stays = await fork_server.fork(["stay", sys.argv[1]])
told = await told_by(sys.argv[1])
os.kill(fork_server.pid, signal.SIGKILL)
try:
    await fork_server.fork(["end", "0"])
except ForkServerError as error:
    said["error"] = str(error)
said["code"] = stays.returncode
stays.kill()
await stays.wait()
await fork_server.close()
""",
        str(tmp_path / "told"),
    )
    assert found["code"] is None
    assert found["error"].startswith("no more workers can be forked: ")


def test_a_killed_head_takes_fork_server_and_workers_along(tmp_path: Any) -> None:
    path = tmp_path / "told"
    process = start_head(
        """
await fork_server.fork(["stay", sys.argv[1]])
await told_by(sys.argv[1])
print(fork_server.pid, flush=True)
await asyncio.sleep(60)
""",
        str(path),
    )
    assert process.stdout is not None
    fork_server = int(process.stdout.readline())
    pids = [fork_server, json.loads(path.read_text())["pid"]]
    assert all(map(is_alive, pids))
    process.kill()
    process.communicate()
    assert until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("lacks", ["pidfd_open", "listdir"])
def test_where_the_system_cannot_nothing_is_forked(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, lacks, refuse)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert open_fork_server({}, lambda line: None) is None


def test_where_there_are_threads_nothing_is_forked() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    before = os.listdir("/proc/self/fd")
    assert open_fork_server({}, lambda line: None) is None
    assert len(os.listdir("/proc/self/fd")) == len(before)
    ends.set()
    thread.join()


def test_a_head_that_ends_without_the_last_answer_is_no_error() -> None:
    """The head leaves an answer unread, which resets the connection."""
    said = run_head("""
import select
from moonpool.head.fork_server import adopt_orphans
adopt_orphans(True)
fork_server._control.setblocking(True)
fork_server._control.send(json.dumps(["end", "0"]).encode())
assert select.select([fork_server._control], [], [], 10)[0]
fork_server._control.close()
said["status"] = os.waitpid(fork_server.pid, 0)[1]
""")
    assert said["status"] == 0


def test_serve_imports_nothing_that_starts_threads() -> None:
    """A process with threads cannot fork safely, so each worker would silently import torch alone,
    into memory of its own."""
    code = "import os, moonpool.cli.serve; print(len(os.listdir('/proc/self/task')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


def test_what_can_wait_comes_after_the_load_and_a_pause(tmp_path: Any) -> None:
    found = run_head(
        """
import moonpool.head.fork_server as module
module.IDLE_S = 0.2
notes = sys.argv[1]

def note(word):
    def write():
        with open(notes, "a") as file:
            file.write(word + " ")
    return write

other = open_fork_server({}, work, note("prepare"), None, note("load"), note("settle"))
said["first"] = await (await other.fork(["end", "3"])).wait()
while "settle" not in open(notes).read():
    await asyncio.sleep(0.01)
said["second"] = await (await other.fork(["end", "4"])).wait()
said["notes"] = open(notes).read().split()
await other.close()
await fork_server.close()
""",
        str(tmp_path / "notes"),
    )
    assert (found["first"], found["second"]) == (3, 4)
    assert found["notes"] == ["prepare", "load", "settle"]


def test_a_close_does_not_wait_for_the_load(tmp_path: Any) -> None:
    found = run_head(
        """
load = lambda: (open(sys.argv[1], "w").close(), time.sleep(600))
other = open_fork_server({}, work, load=load)
said["first"] = await (await other.fork(["end", "3"])).wait()
while not os.path.exists(sys.argv[1]):
    await asyncio.sleep(0.01)
began_s = time.monotonic()
await other.close()
said["s"] = time.monotonic() - began_s
said["pid"] = other.pid
await fork_server.close()
""",
        str(tmp_path / "loads"),
    )
    assert found["first"] == 3 and not is_alive(found["pid"])


RENEWING = """
RENEWED = (
    "import socket, sys; from moonpool.head.fork_server import serve_renewed; "
    "line = serve_renewed(socket.socket(fileno=int(sys.argv[1])), lambda: None); "
    "sys.exit(int(line[1]))"
)

async def renewal(control):
    fd = control.fileno()
    command = [sys.executable, "-c", RENEWED, str(fd)]
    return await asyncio.create_subprocess_exec(
        *command, pass_fds=(fd,), start_new_session=True)

fork_server._renewal = renewal
said["before"] = await (await fork_server.fork(["end", "3"])).wait()
said["first"] = fork_server.pid

async def forked(code):
    by_s = time.monotonic() + 60
    while True:
        try:
            return await (await fork_server.fork(["end", str(code)])).wait()
        except ForkServerError:
            assert time.monotonic() < by_s
            await asyncio.sleep(0.05)
"""


@pytest.mark.long
def test_a_fork_server_that_has_ended_is_replaced_each_time() -> None:
    found = run_head(
        RENEWING
        + """
said["codes"], said["pids"] = [], []
for code in (4, 5):
    os.kill(fork_server.pid, signal.SIGKILL)
    said["codes"].append(await forked(code))
    said["pids"].append(fork_server.pid)
await fork_server.close()
"""
    )
    assert (found["before"], found["codes"]) == (3, [4, 5])
    assert len({found["first"], *found["pids"]}) == 3
    assert not any(map(is_alive, found["pids"]))


WITH_SPARE = """
async def spare():
    by_s = time.monotonic() + 60
    while fork_server._spare is None:
        assert time.monotonic() < by_s
        await asyncio.sleep(0.01)
    return fork_server._spare.process.pid

said["codes"] = [await (await fork_server.fork(["end", "3"])).wait()]
"""


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_dead_fork_server_at_once_each_time(tmp_path: Any) -> None:
    """Each dead fork server is replaced by the spare, not by a new interpreter."""
    found = run_head(
        WITH_SPARE
        + """
said["spares"], said["pids"] = [], []
for code, number in ((4, signal.SIGKILL), (5, signal.SIGSTOP), (6, signal.SIGKILL)):
    said["spares"].append(await spare())
    os.kill(fork_server.pid, number)
    if number == signal.SIGSTOP:
        while not is_stopped(fork_server.pid):
            await asyncio.sleep(0.01)
    forked = await fork_server.fork(["end", str(code)])  # before the end is noticed
    said["codes"].append(await forked.wait())
    said["pids"].append(fork_server.pid)
said["last"] = await spare()
worker = await fork_server.fork(["stay", sys.argv[1]])
said["told"] = await told_by(sys.argv[1])
worker.kill()
await worker.wait()
await fork_server.close()
""",
        str(tmp_path / "told"),
    )
    assert found["codes"] == [3, 4, 5, 6]
    assert found["spares"] == found["pids"] and len(set(found["pids"])) == 3
    told = found["told"]
    assert told["parent"] == found["head"] and told["session"] == told["pid"]
    assert told["word"] == "salt" and told["fds"] <= 4
    everyone = [found["fork_server"], *found["pids"], found["last"]]
    assert not any(map(is_alive, everyone)), "closed, or killed because it was stopped"


def test_a_fork_server_that_cannot_be_started_is_tried_ever_more_rarely() -> None:
    found = run_head(
        """
import logging
import moonpool.head.fork_server as module

logging.disable()
module.RENEWALS = module.RetryDelays((0.0, 0.0, 60.0))
said["tries"] = 0

async def renewal(control):
    said["tries"] += 1
    raise OSError("too many processes")

fork_server._renewal = renewal
await (await fork_server.fork(["end", "0"])).wait()
os.kill(fork_server.pid, signal.SIGKILL)
while said["tries"] < 2:
    await asyncio.sleep(0.01)
await asyncio.sleep(0.3)
await fork_server.close()
"""
    )
    assert found["tries"] == 2


@pytest.mark.long
def test_a_dead_spare_is_replaced_and_both_together_by_a_new_interpreter() -> None:
    found = run_head(
        WITH_SPARE
        + RENEWING.replace('said["before"]', "_")
        + """
first = await spare()
os.kill(first, signal.SIGKILL)
while fork_server._spare is None or fork_server._spare.process.pid == first:
    await asyncio.sleep(0.01)
said["codes"].append(await (await fork_server.fork(["end", "4"])).wait())
said["same"] = fork_server.pid == said["fork_server"]
for pid in (await spare(), fork_server.pid):
    os.kill(pid, signal.SIGKILL)
said["codes"].append(await forked(5))
said["renewed"] = fork_server.pid
said["of_renewed"] = await spare()
os.kill(fork_server.pid, signal.SIGKILL)
said["codes"].append(await (await fork_server.fork(["end", "6"])).wait())
await fork_server.close()
"""
    )
    assert found["codes"] == [3, 4, 5, 6] and found["same"]
    assert not any(map(is_alive, (found["renewed"], found["of_renewed"])))


def test_a_killed_head_takes_the_spare_along() -> None:
    process = start_head(WITH_SPARE + "print(await spare(), flush=True)\nawait asyncio.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.communicate()
    assert until(lambda: not is_alive(pid))


def test_a_stopped_fork_server_is_not_waited_for() -> None:
    found = run_head(
        """
await (await fork_server.fork(["end", "0"])).wait()
os.kill(fork_server.pid, signal.SIGSTOP)
while not is_stopped(fork_server.pid):
    await asyncio.sleep(0.01)
try:
    await fork_server.fork(["end", "0"])
except ForkServerError as error:
    said["error"] = str(error)
os.kill(fork_server.pid, signal.SIGCONT)
while is_stopped(fork_server.pid):
    await asyncio.sleep(0.01)
said["code"] = await (await fork_server.fork(["end", "7"])).wait()
os.kill(fork_server.pid, signal.SIGSTOP)
await fork_server.close()
"""
    )
    assert "stopped" in found["error"] and found["code"] == 7
    assert not is_alive(found["fork_server"])


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("cli.serve", "torch numpy httpx yaml jinja2 tokenizers rich moonpool.trace.reader"),
        ("head.cluster", "torch httpx rich"),
        ("api.body_process", "torch httpx rich llguidance numpy uvicorn"),
    ],
)
def test_a_start_imports_nothing_that_only_others_need(module: str, spared: str) -> None:
    """Needless imports would delay the first token."""
    code = f"import sys, moonpool.{module}; print(set('{spared}'.split()) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"

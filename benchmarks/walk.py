"""Counts the files that run while one chat completion is served.

`python -m benchmarks.walk [ROOT]` prints them as JSON. A server with one mixed instance starts
under a profile hook. After a first request, the hook records which functions of the package run
while nothing happens, and which others run during a second request. The files of the latter
functions are counted: `prompt` counts files that run before the model's forward, `head` and
`worker` all files of these processes, including those that return the answer. With the root of
another checkout as argument, it measures that checkout.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from benchmarks.checkout import ROOT

HOOK = """
import os, signal, sys, threading, time
seen, place = {}, os.environ["WALK_FOLDER"]
def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and "/src/moonpool" in name:
        name = name.rsplit("/src/", 1)[1] + ":" + frame.f_code.co_qualname
        seen.setdefault(name, time.monotonic())
def dump(number, frame):
    with open(f"{place}/{os.getpid()}", "w") as file:
        file.write("\\n".join(f"{name} {at_s}" for name, at_s in seen.items()))
    seen.clear()
if not os.environ.get("WALK_OFF"):
    signal.signal(signal.SIGUSR2, dump)
    threading.setprofile(note)
    sys.setprofile(note)
"""
MODEL = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=64,vocab=300"
FORWARD = "/engine/model.py:"
SOURCES = ("src", "engine/src", "lab/src")
UP_S = 120.0
IDLE_S = 3.0


def walk(root: Path) -> dict[str, list[str]]:
    """Returns the files of the head, those of the worker, and those before the model's forward."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "sitecustomize.py").write_text(HOOK)
        port = _free_port()
        environment = os.environ | {
            "PYTHONPATH": ":".join([place, *(str(root / folder) for folder in SOURCES)]),
            "WALK_FOLDER": place,
        }
        flags = ["--mixed", "1", "--prefill", "0", "--decode", "0", "--kv-tokens", "4096"]
        command = [sys.executable, "-m", "moonpool", "serve", MODEL, *flags, "--port", str(port)]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as server:
            try:
                _wait_until_up(port)
                return _record(port, Path(place), server.pid)
            finally:
                server.send_signal(signal.SIGTERM)


def _record(port: int, place: Path, supervisor: int) -> dict[str, list[str]]:
    _chat(port)
    processes = _children(supervisor)
    _functions(place, processes)
    time.sleep(IDLE_S)
    idle = _functions(place, processes)
    _chat(port)
    served = _functions(place, processes)
    called = {
        name: {f: at for f, at in served[name].items() if f not in idle[name]} for name in processes
    }
    forward_s = min(at for f, at in called["worker"].items() if FORWARD in f)
    before = {f for found in called.values() for f, at in found.items() if at <= forward_s}
    return {name: _files(found) for name, found in called.items()} | {"prompt": _files(before)}


def _files(functions: Iterable[str]) -> list[str]:
    return sorted({one.split(":")[0] for one in functions})


def _functions(place: Path, processes: dict[str, int]) -> dict[str, dict[str, float]]:
    """Returns the functions that ran since the last call, as `file:function`, and when first."""
    for pid in processes.values():
        (place / str(pid)).unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
    time.sleep(1.0)
    lines = {name: (place / str(pid)).read_text().splitlines() for name, pid in processes.items()}
    return {
        name: {function: float(at_s) for function, at_s in (one.rsplit(" ", 1) for one in found)}
        for name, found in lines.items()
    }


def _children(supervisor: int) -> dict[str, int]:
    """Returns the processes of a supervisor's head and worker, as `ps` shows them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").split()
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        for name, command in (("head", "head-process"), ("worker", "worker")):
            if int(fields[1]) == supervisor and command.encode() in words:
                found[name] = int(folder.name)
    return found


def _chat(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=UP_S).read()


def _wait_until_up(port: int) -> None:
    until_s = time.monotonic() + UP_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    found = walk(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    counts = {name: len(names) for name, names in found.items()}
    sys.stdout.write(json.dumps({**counts, "names": found}, indent=1) + "\n")

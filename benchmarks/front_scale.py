"""Measures what fronts and the Conductor cost, in front of servers that compute nothing.

    python -m benchmarks.front_scale --streams 256 --tokens 64 [--router-python PATH] [--json FILE]

The same load (many long streams, then short calls) goes in turn to one of the servers directly, to
moonpool with one process (`--fronts 1`), to moonpool with fronts, and to vllm-router. The CPU time
of each kind of process tells the load that more fronts on more cores could carry: each front's CPU
time falls with their number, and the Conductor's does not. Load and stubs take CPU of the same
machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from benchmarks.suite.live.idle import cpu_s, family
from benchmarks.suite.live.vllm_router import RouterServer
from moonpool.cli.output import origin, write_json
from moonpool_lab.demo.local_server import LocalServer

PAPER_FRONTS = (1, 2, 16)
LOAD_S = 1200.0
Figures = dict[str, Any]
DIRECT = "no front"
KINDS = ("front", "head", "worker", "supervisor", "router")


@contextmanager
def token_stubs(count: int, gap_s: float) -> Iterator[list[str]]:
    """Servers in processes of their own; gives their URLs."""
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            line = [sys.executable, "-m", "benchmarks.suite.live.token_stub", "0", str(gap_s)]
            stub = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(stub.kill)
            assert stub.stdout is not None
            urls.append(f"http://127.0.0.1:{int(stub.stdout.readline())}")
        yield urls


def kind_of(pid: int) -> str:
    """Returns the kind of a server's process."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    words = line.decode(errors="replace").split()
    for word, kind in (("front-process", "front"), ("head-process", "head"), ("worker", "worker")):
        if word in words:
            return kind
    return "supervisor"


def spent_s(server: LocalServer) -> defaultdict[str, float]:
    """CPU seconds by kind of process."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid in family(server.pid):
        try:
            kind = "router" if isinstance(server, RouterServer) else kind_of(pid)
            found[kind] += cpu_s(pid)
        except OSError:  # the process has just ended
            continue
    return found


def load(port: int, streams: int, tokens: int, calls: int) -> dict[str, Any]:
    """Runs the load and returns its figures. Raises BenchError."""
    line = [sys.executable, "-m", "benchmarks.suite.live.token_load", str(port)]
    done = subprocess.run(
        [*line, str(streams), str(tokens), str(calls)],
        capture_output=True,
        text=True,
        timeout=LOAD_S,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"the load failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["errors"]:
        raise BenchError(f"{found['errors']} calls failed: {found['first_error']}")
    return found


def load_server(server: LocalServer, streams: int, tokens: int, calls: int) -> dict[str, Any]:
    """Sends the load to a server, and also returns the CPU seconds of the server's processes.
    Raises BenchError."""
    before = spent_s(server)
    try:
        found = load(server.port, streams, tokens, calls)
    except BenchError as error:
        raise BenchError(f"{error}; {server.last_words()}") from None
    after = spent_s(server)
    return found | {"cpu_s": {kind: after[kind] - before[kind] for kind in KINDS if after[kind]}}


def measure(run: Callable[[int, int, int], dict[str, Any]], asked: argparse.Namespace) -> Figures:
    """Tokens and requests a second, and the CPU of each by kind of process."""
    run(8, 8, 4)  # modules that are imported late are imported now
    short = run(asked.connections, 1, asked.calls)
    long = run(asked.streams, asked.tokens, 1)
    num_tokens = asked.streams * asked.tokens
    request_ms = {kind: 1e3 * s / short["calls"] for kind, s in short.get("cpu_s", {}).items()}
    token_us = {
        kind: max(1e6 * (s - request_ms[kind] / 1e3 * asked.streams) / num_tokens, 0.0)
        for kind, s in long.get("cpu_s", {}).items()
    }
    return {
        "requests_per_s": short["calls"] / short["seconds"],
        "ttft_p50_ms": short["ttft_p50_ms"],
        "tokens_per_s": num_tokens / long["seconds"],
        "cpu_ms_per_request": request_ms,
        "cpu_us_per_token": token_us,
    }


def on_paper(found: dict[str, Any], num_fronts: int) -> dict[str, float]:
    """Returns the load that this many fronts can carry, each on its own core, with the Conductor on
    a further core."""
    shares = {}
    for name, costs, unit in (
        ("tokens_per_s", found["cpu_us_per_token"], 1e6),
        ("requests_per_s", found["cpu_ms_per_request"], 1e3),
    ):
        front, head = costs.get("front", 0.0), costs.get("head", 0.0)
        bounds = [num_fronts * unit / front if front else 0.0, unit / head if head else 0.0]
        shares[name] = min((bound for bound in bounds if bound), default=0.0)
    return shares


def name_of(num_fronts: int) -> str:
    return "1 process" if num_fronts == 1 else f"{num_fronts} fronts"


def servers(asked: argparse.Namespace, urls: Sequence[str]) -> Iterator[tuple[str, LocalServer]]:
    flags = [word for url in urls for word in ("--vllm", url)]
    flags += ["--admission", "none", "--request-timeout", "3600"]
    for count in asked.fronts:
        yield name_of(count), LocalServer([*flags, "--fronts", str(count)])
    if asked.router_python:
        yield "vllm-router", RouterServer(asked.router_python, urls, ["--policy", "round_robin"])


def show(name: str, found: dict[str, Any]) -> None:
    def costs(key: str) -> str:
        return ", ".join(f"{kind} {cost:.2f}" for kind, cost in found[key].items())

    ttft = found["ttft_p50_ms"]
    print(
        f"{name:12} {found['tokens_per_s']:10,.0f} tokens/s {found['requests_per_s']:8,.0f}"
        f" requests/s  TTFT P50 {ttft:.1f} ms"
    )
    if not found["cpu_us_per_token"]:
        return
    print(f"{'':12} CPU us a token: {costs('cpu_us_per_token')}")
    print(f"{'':12} CPU ms a request: {costs('cpu_ms_per_request')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=256, help="Streams at once.")
    parser.add_argument("--tokens", type=int, default=64, help="Tokens of each stream.")
    parser.add_argument("--connections", type=int, default=16, help="Of the short calls.")
    parser.add_argument("--calls", type=int, default=64, help="Short calls of each connection.")
    parser.add_argument("--fronts", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--stubs", type=int, default=2, help="Servers that compute nothing.")
    parser.add_argument("--gap", type=float, default=0.02, help="Seconds of a stub's step.")
    parser.add_argument("--router-python", default="", help="Python with vllm-router.")
    parser.add_argument("--json")
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shape = ("streams", "tokens", "connections", "calls", "stubs", "gap")
    figures: Figures = {"asked": {name: getattr(asked, name) for name in shape}}
    with token_stubs(asked.stubs, asked.gap) as urls:
        port = int(urls[0].rpartition(":")[2])
        figures[DIRECT] = measure(partial(load, port), asked)
        show(DIRECT, figures[DIRECT])
        for name, server in servers(asked, urls):
            with server:
                time.sleep(1.0)
                found = figures[name] = measure(partial(load_server, server), asked)
                show(name, found)
    measured = figures[name_of(max(asked.fronts))]
    paper = {f"{count} fronts": on_paper(measured, count) for count in PAPER_FRONTS}
    for name, found in paper.items():
        tokens, requests = found["tokens_per_s"], found["requests_per_s"]
        print(f"on paper, {name}: {tokens:,.0f} tokens/s, {requests:,.0f} requests/s")
    command = " ".join(["python -m benchmarks.front_scale", *sys.argv[1:]])
    figures |= {"on_paper": paper, "origin": origin() | {"command": command}}
    write_json(asked.json, figures)


if __name__ == "__main__":
    main()

"""Lists the commands of the documentation pages, and says how a test runs each command in a folder
of its own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=128,vocab=20000"

NOT_RUN = {
    "moonpool bench": "measures for minutes; tests/unit/benchmarks runs the suites",
    "moonpool trace download": "needs a network",
    "moonpool reproduce": "simulates for minutes; tests/unit/papers runs the figures",
    "moonpool head": "one machine of several; tests/live starts heads and workers on one",
    "moonpool worker": "one machine of several; tests/live starts heads and workers on one",
    "moonpool serve --vllm": "needs vLLM; tests/live/test_vllm.py has stand-ins of its servers",
    "moonpool serve MODEL --mooncake-master": "needs Mooncake; tests/live/test_mooncake.py",
    "moonpool serve MODEL --lora-modules": "needs adapters; tests/live/test_lora.py makes them",
    "moonpool serve MODEL --host 0.0.0.0 --ssl": "needs certificates; tests/live/test_https.py",
    "moonpool serve MODEL --speculative-config": "needs a second model; tests/live speculates",
    "moonpool serve owner/repo": "needs a network",
    "moonpool serve smollm2": "needs a package of 98 MB; tests/live/test_checkpoint.py",
    "moonpool serve model.Q4_K_M.gguf": "needs a GGUF file; tests/differential makes them",
    "moonpool serve /models/": "needs a checkpoint; tests/live/test_checkpoint.py makes one",
    "moonpool serve Qwen": "needs a network",
    "moonpool profile http": "measures for minutes; tests/live/test_live_profile.py",
    "moonpool upgrade": "replaces processes for minutes; tests/live/test_upgrade.py",
    "moonpool trial http://moonpool:8000": "needs two other servers; tests/live/test_trial.py",
    "moonpool trial http://127.0.0.1:8000 --may-reset-cache --restart-command": "needs a service "
    "manager; tests/live/test_trial.py restarts a server",
    "moonpool replay http://127.0.0.1:9000": "needs another server; tests/live/test_replay.py",
    "moonpool run": "chats until it is ended; tests/live/test_run.py has a terminal and models",
    "moonpool epp": "needs a gateway; tests/live/test_epp.py has an Envoy and servers",
    "moonpool pool serve": "serves until it is ended; tests/live/test_host_pool.py has clients",
    "moonpool serve random:m150 --launcher ray": "needs Ray; tests/live/test_ray.py",
    "moonpool forecast": "measures for minutes; tests/unit/forecast has servers of known times",
    "moonpool reproduce --list": "",
}
"""Maps beginnings of commands that no test here runs to the reason. If several beginnings
fit a command, the longest one decides. With an empty reason the command runs."""

OTHER_SERVERS = ("//10.0.0.1:8000", "//127.0.0.1:8080", "//127.0.0.1:9090")
"""Lists addresses in commands that other tests run: two hosts in test_two_hosts.py, a gateway in
test_epp.py."""

SMALLER = {
    "simulate": ("--requests", "300"),
    "serve": ("--port", "0", "--kv-tokens", "4096", "--block-size", "16"),
    "trial": ("--requests", "24", "--families", "1", "--repeats", "2", "--fill-words", "200"),
    "replay": ("--requests", "4", "--scale-tokens", "1/512", "--speed", "100"),
    "plan": (
        *("--requests", "40", "--runs", "12", "--seeds", "2", "--processes", "1"),
        *("--slo-ttft", "30"),
    ),
    "profile": ("--curve-time", "2"),
    "oracle": (
        "--requests",
        "20",
    ),
}
"""Lists flags that follow the page's own flags and override them, so that the test takes seconds
instead of minutes."""
SHORT_TRACE = "t.jsonl"
"""Names a trace that is compared live and simulated; its commands run unchanged."""
AT_SERVER = {"pool stat", "pool ls", "pool audit", "pool drain", "replay"}
"""Lists commands that ask port 8000 of this machine unless an option names another server."""


class Line(NamedTuple):
    """Holds one line of a page that calls moonpool."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)[1:]

    @property
    def command(self) -> str:
        first, *rest = self.words
        return f"{first} {rest[0]}" if first in ("pool", "trace", "config", "bench") else first

    @property
    def not_run(self) -> str:
        """Returns why no test here runs the command, or "" if a test runs it."""
        fits = [start for start in NOT_RUN if self.text.startswith(start)]
        return NOT_RUN[max(fits, key=len)] if fits else ""


def shell_lines(page: Path) -> list[str]:
    """Returns the lines of a page's shell blocks without comments; a continued line counts as
    one."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#( .*)?$", "", line).removeprefix(".venv/bin/").strip() for line in lines]


def moonpool_lines() -> list[Line]:
    """Returns every moonpool command of the pages once, in the order of the pages."""
    found = [
        Line(page.name, line)
        for page in PAGES
        for line in shell_lines(page)
        if line.startswith("moonpool ")
    ]
    first: dict[str, Line] = {}
    for line in found:
        first.setdefault(line.text, line)
    return list(first.values())


def curl_lines() -> list[Line]:
    found = [Line(page.name, line) for page in PAGES for line in shell_lines(page)]
    elsewhere = re.compile("|".join(map(re.escape, OTHER_SERVERS)))
    return [x for x in found if x.text.startswith("curl ") and not elsewhere.search(x.text)]


def words_here(line: Line, url: str, folder: Path) -> list[str]:
    """Returns the words after `moonpool`, as they run in a test's `folder` against the server at
    `url`."""
    words = [
        word.replace("http://127.0.0.1:8000", url)
        .replace("MODEL", TINY)
        .replace("/data", str(folder / "data"))
        .replace("/dev/shm/moonpool", str(folder / "kept"))
        for word in line.words
    ]
    if SHORT_TRACE not in words:
        words += SMALLER.get(line.command, ())
    if line.command in AT_SERVER and url not in words:
        words.append(url)
    return words

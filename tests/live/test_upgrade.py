"""`moonpool upgrade` under load replaces every process, and no answer fails or changes."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import moonpool
from benchmarks.suite.live.kills.calls import Body
from moonpool_lab.demo.local_server import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import shared_memory_names, wait_until_gone
from tests.live.test_head_death import ask, bodies
from tests.processes import children_of

NEXT = "0.1.0+next"
OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a copy of the package, from which servers run."""
    folder = tmp_path / "code" / "moonpool"
    shutil.copytree(Path(moonpool.__file__).parent, folder)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder


def install_next(code: Path) -> None:
    path = code / "__init__.py"
    text = path.read_text()
    assert f'__version__ = "{moonpool.__version__}"' in text
    path.write_text(text.replace(f'"{moonpool.__version__}"', f'"{NEXT}"', 1))


def upgrade(server: LocalServer) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "moonpool", "upgrade", server.url, "--within", "20"]
    return subprocess.run(line, capture_output=True, text=True, timeout=400, check=False)


def shapes(lines: str) -> set[str]:
    """Returns the lines without names of instances, numbers, times and versions."""
    named = re.sub(r"^[\w-]+-\d+:", "INSTANCE:", lines.strip(), flags=re.M)
    return set(re.sub(r"\d[\w.+]*", "N", named).splitlines())


class Load:
    """Sends the same calls again and again, and compares each answer with its undisturbed
    answer."""

    def __init__(self, url: str, num_threads: int = 3) -> None:
        self.url = url
        self.calls = bodies()[:8]
        self.expected = [ask(url, *call) for call in self.calls]
        self.num_right = 0
        self.errors: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            number = (number + 1) % len(self.calls)
            try:
                got = ask(self.url, *self.calls[number])
            except Exception as error:
                self.errors.append(f"{self.calls[number][0]}: {error!r}")
                return
            with self._lock:
                self.num_right += got == self.expected[number]
                if got != self.expected[number]:
                    self.errors.append(f"{self.calls[number][0]}: another answer")

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(300)


class OneConnection(threading.Thread):
    """Acts as a client that asks small questions over one connection, which must not end."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__()
        self.num_answers = 0
        self.error = ""
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        self._connection.connect()
        self._connection.auto_open = 0  # keeps the client from connecting again
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._over.wait(0.1):
                self._connection.request("GET", "/v1/models")
                with self._connection.getresponse() as response:
                    assert response.status == 200, response.read()
                    response.read()
                self.num_answers += 1
        except Exception as error:
            self.error = repr(error)

    def end(self) -> None:
        self._over.set()
        self.join(120)


@pytest.mark.long
@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(["--prefill", "1", "--decode", "2"], marks=pytest.mark.long, id="1P+2D"),
        pytest.param(["--mixed", "1"], id="1M"),
    ],
)
def test_an_upgrade_replaces_every_process_and_costs_no_answer(
    arrangement: list[str], code: Path
) -> None:
    before = shared_memory_names()
    with LocalServer([MODEL, *arrangement, *SMALL, "--admission", "none"]) as server:
        load = Load(server.url)
        asking = OneConnection(server)
        former = children_of(server.pid)
        install_next(code)
        done = upgrade(server)
        num_right, num_answers = load.num_right, asking.num_answers
        load.end()
        asking.end()
        assert done.returncode == 0, done.stderr
        assert f"the cluster runs release {NEXT}" in done.stdout
        documented = OPERATING.read_text().partition("## Upgrading")[2].split("```")[3]
        assert shapes(done.stdout) <= shapes(documented)
        assert load.errors == []
        assert asking.error == ""
        assert asking.num_answers > num_answers, "the next head serves the connection, too"
        assert num_right, "answers ended while the processes were replaced"
        cluster = fresh.get(f"{server.url}/cluster", timeout=60).json()
        assert {i["release"] for i in cluster["instances"]} == {NEXT}
        assert len(cluster["instances"]) == sum(map(int, arrangement[1::2]))
        assert cluster["head"]["upgrades"] == 1
        assert cluster["head"]["restarts"] == 0
        assert wait_until_gone(former) == []
        pids = [server.pid, *children_of(server.pid)]
        assert server.stop() == 0
    assert wait_until_gone(pids) == []
    assert shared_memory_names() <= before


@pytest.mark.long
def test_code_that_does_not_start_replaces_nothing(code: Path) -> None:
    with LocalServer([MODEL, "--mixed", "1", *SMALL]) as server:
        call: tuple[str, Body] = bodies()[5]
        expected = ask(server.url, *call)
        former = server.instances()[0]["pid"], fresh.get(f"{server.url}/cluster").json()["head"]
        (code / "head" / "cluster.py").write_text("this is no Python\n")
        answer = fresh.post(f"{server.url}/cluster/upgrade", json={}, timeout=60)
        assert answer.status_code == 202
        error = None
        while error is None:
            head = fresh.get(f"{server.url}/cluster", timeout=60).json()["head"]
            assert head["upgrades"] == 0
            error = head["upgrade_error"]
        assert "the next head does not start" in error
        assert (server.instances()[0]["pid"], head["pid"]) == (former[0], former[1]["pid"])
        assert ask(server.url, *call) == expected
        os.kill(server.pid, 0)

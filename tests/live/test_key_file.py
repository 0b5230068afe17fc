"""A key file loses its keys while the server runs: an upgrade is called off, and a restarted head
waits for keys. At no moment does the server accept calls without a key."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_head_death import head_of
from tests.live.waiting import wait_until

KEYS = "k-ann ann\nk-op admin\n"
OPERATOR = {"authorization": "Bearer k-op"}
PATIENCE_S = 300.0

pytestmark = [pytest.mark.live, pytest.mark.long]


class Stranger:
    """Sends calls without a key all the time."""

    def __init__(self, url: str) -> None:
        self.seen: set[int] = set()
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.05):
            try:
                self.seen.add(httpx.get(f"{self._url}/cluster", timeout=1).status_code)
            except httpx.HTTPError:  # fails while no head runs
                continue

    def end(self) -> set[int]:
        self._ends.set()
        self._thread.join()
        return self.seen


def test_a_key_file_that_loses_its_keys_never_opens_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    line = [MODEL, "--mixed", "1", *SMALL, "--api-key-file", str(path)]
    with LocalServer(line) as server:
        stranger = Stranger(server.url)
        path.write_text("# none\n")
        upgrade = fresh.post(
            f"{server.url}/cluster/upgrade", json={}, headers=OPERATOR, timeout=PATIENCE_S
        )
        assert upgrade.status_code == 202
        error = None
        while error is None:
            cluster = fresh.get(f"{server.url}/cluster", headers=OPERATOR, timeout=PATIENCE_S)
            error = cluster.json()["head"]["upgrade_error"]
        assert f"the key file {path} has no key" in error
        os.kill(head_of(server), signal.SIGKILL)
        wait_until(
            lambda: any("has no key" in said and " ERROR " in said for said in server.log_lines())
        )
        path.write_text(KEYS)
        again = fresh.get(f"{server.url}/cluster", headers=OPERATOR, timeout=PATIENCE_S)
        assert again.status_code == 200
        assert stranger.end() == {401}

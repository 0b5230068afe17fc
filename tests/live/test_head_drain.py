"""The head is told to stop: answers are completed, or their streams end with the reason, and the
log has no traceback."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import LONG
from tests.live.test_head_pause import started


def read(client: httpx.Client, name: str, body: dict[str, Any], got: dict[str, str]) -> None:
    headers = {"X-Request-Id": name}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        got[name] = "".join(response.iter_text())  # raises if the connection is cut


def end_while_streaming(
    drain_seconds: str, bodies: dict[str, dict[str, Any]], sign: signal.Signals
) -> tuple[dict[str, str], str]:
    """Returns the texts of the streams, and the server's log."""
    got: dict[str, str] = {}
    line = [MODEL, "--prefill", "1", "--decode", "1", *SMALL, "--drain-seconds", drain_seconds]
    with LocalServer(line) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        threads = [
            threading.Thread(target=read, args=(client, name, body, got))
            for name, body in bodies.items()
        ]
        for thread in threads:
            thread.start()
        for name in bodies:
            started(client, name)
        ended = threading.Thread(target=lambda: got.update(status=str(server.stop(sign, 60))))
        ended.start()
        refused = client.post("/v1/completions", json={"prompt": "x"})
        while refused.status_code == 200:
            refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "server_stopping"
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/ready").json()["reason"] == "the server is stopping"
        assert client.get("/live").status_code == 200
        for thread in [*threads, ended]:
            thread.join(60)
        return got, server.last_words(1000)


@pytest.mark.long
def test_answers_end_within_the_time_of_the_drain_and_others_with_an_error() -> None:
    endless = LONG | {"prompt": [9] * 20, "max_tokens": 7000, "stream": True}
    bodies = {"long": endless, "short": LONG | {"max_tokens": 200, "stream": True}}
    got, log = end_while_streaming("3", bodies, signal.SIGTERM)
    assert got["status"] == "0"
    assert got["short"].rstrip().endswith("data: [DONE]")
    last = json.loads(got["long"].strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["code"] == "server_stopping"
    assert "Traceback" not in log and "error" not in log.lower().replace("errors", "")

"""Two tenants at one server: a flood of the first refuses no request of the second."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL

BODY = {"prompt": [5] * 200, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
SMALL_BODY = {"prompt": [7] * 20, "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def flood(url: str, over: threading.Event, statuses: Counter[int]) -> None:
    client = httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer sk-flood"})
    while not over.is_set():
        statuses[client.post("/v1/completions", json=BODY).status_code] += 1
        time.sleep(0.02)


@pytest.mark.long
def test_a_flood_of_one_tenant_leaves_places_for_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-flood flood\nsk-small small\nsk-op admin\n")
    line = [MODEL, "--prefill", "1", "--decode", "1", "--api-key-file", str(keys)]
    with LocalServer([*line, "--kv-tokens", "2048", "--block-size", "16"]) as server:
        over, statuses = threading.Event(), Counter[int]()
        threads = [
            threading.Thread(target=flood, args=(server.url, over, statuses)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        small = httpx.Client(
            base_url=server.url, timeout=60, headers={"authorization": "Bearer sk-small"}
        )
        time.sleep(1.0)
        found = Counter(
            small.post("/v1/completions", json=SMALL_BODY).status_code for _ in range(30)
        )
        cluster = small.get("/cluster").json()
        over.set()
        for thread in threads:
            thread.join(60)
    assert found == {200: 30}
    assert statuses[200] > 5
    assert statuses[429] + statuses[503] > 20, "the flood was no flood"
    assert set(cluster["instances"][0]) == {"instance_id", "role", "draining"}

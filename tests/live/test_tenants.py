"""Two tenants use one server: a flood of the first tenant refuses no request of the second."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL
from tests.live.waiting import wait_until

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
        wait_until(lambda: statuses[200] > 5)
        found = Counter(
            small.post("/v1/completions", json=SMALL_BODY).status_code for _ in range(30)
        )
        cluster = small.get("/cluster").json()
        operator = httpx.get(
            f"{server.url}/cluster", timeout=60, headers={"authorization": "Bearer sk-op"}
        ).json()
        over.set()
        for thread in threads:
            thread.join(60)
    assert found == {200: 30}
    refused = statuses[429] + statuses[503]
    assert operator["requests_waiting"] > 0 or refused > 20, "the flood was no flood"
    assert set(cluster["instances"][0]) == {"instance_id", "role", "model", "draining"}


def test_limits_of_a_key_file_hold_at_a_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    # The limit allows one call immediately, and the next one after 100 s, which is longer than this
    # test takes.
    bulk_limits = "priority=5 requests_per_s=0.01 cache=0.25"
    keys.write_text(f"sk-bulk bulk {bulk_limits}\nsk-late late priority=5\nsk-op admin\n")
    line = [MODEL, "--prefill", "1", "--decode", "1", "--api-key-file", str(keys)]
    with LocalServer([*line, "--kv-tokens", "2048", "--block-size", "16"]) as server:
        bulk = httpx.Client(
            base_url=server.url, timeout=60, headers={"authorization": "Bearer sk-bulk"}
        )
        first = [bulk.post("/v1/completions", json=SMALL_BODY) for _ in range(2)]
        late = httpx.Client(
            base_url=server.url, timeout=60, headers={"authorization": "Bearer sk-late"}
        )
        better = late.post("/v1/completions", json=SMALL_BODY | {"priority": 1})
        operator = httpx.Client(
            base_url=server.url, timeout=60, headers={"authorization": "Bearer sk-op"}
        )
        other = operator.post("/v1/completions", json=SMALL_BODY | {"priority": -3})
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert [answer.status_code for answer in first] == [200, 429]
    assert first[1].json()["error"]["code"] == "rate_limit"
    assert 1 <= int(first[1].headers["retry-after"]) <= 100
    assert (better.status_code, better.json()["error"]["param"]) == (400, "priority")
    assert other.status_code == 200
    rejected = [line for line in metrics.splitlines() if "requests_rejected_total{" in line]
    assert any('reason="rate_limit"' in line and line.endswith(" 1.0") for line in rejected)

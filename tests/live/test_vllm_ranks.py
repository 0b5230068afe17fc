"""Data-parallel ranks of one vLLM are instances of their own."""

from __future__ import annotations

import time

import httpx

from tests.forked.commands import LocalServer
from tests.live.vllm_stub import VllmStub, stubs
from tests.live.waiting import WAIT_S

RANK = "x-data-parallel-rank"


def test_a_conversation_stays_at_its_rank() -> None:
    with stubs(VllmStub()) as (stub,):
        places = [word for rank in (0, 1) for word in ("--vllm", f"{stub.url}@{rank}")]
        with LocalServer([stub.root, *places, "--admission", "none"]) as server:
            client = httpx.Client(base_url=server.url, timeout=60)
            assert len(server.instances()) == 2
            deadline = time.monotonic() + WAIT_S  # its own requests would be taken for the client's
            while sum("measured http" in line for line in server.log_lines()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            ranks: dict[int, set[str]] = {}
            for turn in range(3):
                for number in range(4):
                    body = {"prompt": [5 + number] * (96 + 16 * turn), "max_tokens": 2}
                    assert client.post("/v1/completions", json=body).status_code == 200
                    ranks.setdefault(number, set()).add(stub.headers[-1][RANK])
            assert all(len(own) == 1 for own in ranks.values())
            assert set.union(*ranks.values()) <= {"0", "1"}
            # Both were asked for themselves: measured, and tried by a short answer.
            assert {headers.get(RANK) for headers in stub.headers} == {"0", "1"}

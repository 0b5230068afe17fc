"""Data-parallel ranks of one vLLM are separate instances."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.forked.commands import LocalServer
from tests.live.vllm_stub import VllmStub, measures, stubs
from tests.live.waiting import WAIT_S, wait_until

RANK = "x-data-parallel-rank"
AT_ONCE = 12


def test_a_conversation_stays_at_its_rank() -> None:
    with stubs(VllmStub()) as (stub,):
        places = [word for rank in (0, 1) for word in ("--vllm", f"{stub.url}@{rank}")]
        with LocalServer([stub.root, *places, "--admission", "none"]) as server:
            client = httpx.Client(base_url=server.url, timeout=60)
            assert len(server.instances()) == 2
            # waits for an idle vLLM, whose earlier requests would look like the client's
            deadline = time.monotonic() + WAIT_S
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
            # Both ranks were measured, and have answered a short call.
            assert {headers.get(RANK) for headers in stub.headers} == {"0", "1"}


def test_ranks_of_an_elastic_server_come_and_go(tmp_path: Path) -> None:
    """Whether the head copes with a vLLM that was scaled down, still names the former ranks in its
    metrics, and refuses their calls."""
    with stubs(VllmStub()) as (stub,):
        stub.num_ranks, stub.gap_s = 2, 0.02
        place = f"name: a, address: 127.0.0.1, port: {stub.port}"
        listed = tmp_path / "servers.yaml"
        label = "labels: {moonpool.dev/data-parallel-size: all}"
        listed.write_text(f"endpoints:\n- {{{place}, {label}}}\n")
        words = [stub.root, "--vllm-endpoints", str(listed), "--admission", "none"]
        with LocalServer(words) as server:
            client = httpx.Client(base_url=server.url, timeout=60)

            def ask(number: int) -> None:
                # small numbers, because the vocabulary has 300 tokens
                tokens = [5 + number % 256, 5 + number // 256 % 256]
                body = {"prompt": tokens * 48, "max_tokens": 2}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

            def ranks_asked() -> set[str]:
                """Sends many calls together, and returns the ranks that served some of them. No
                rank is so slow that the others take all calls."""
                first = len(stub.headers)
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(ask, range(first, first + AT_ONCE)))
                came = zip(stub.calls[first:], stub.headers[first:], strict=False)
                return {headers[RANK] for (_, body), headers in came if not measures(body)}

            wait_until(lambda: len(server.instances()) == 2)
            stub.num_ranks = 3
            wait_until(lambda: len(server.instances()) == 3)
            wait_until(lambda: "2" in ranks_asked())
            stub.num_ranks, stub.stale_ranks = 1, 2
            wait_until(lambda: ranks_asked() == {"0"} and len(server.instances()) == 1)
            wait_until(lambda: "is out of range" in "\n".join(server.log_lines()))
            assert ranks_asked() == {"0"}
            stub.num_ranks, stub.stale_ranks = 3, 0
            wait_until(lambda: len(server.instances()) == 3)

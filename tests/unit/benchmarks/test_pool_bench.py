"""Tests the comparison of pools under vLLM: its questions, its verdicts, and its table."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page_pool
from benchmarks.cli.pool_in_vllm import POOL_CHOICES, WORKLOAD_CHOICES
from benchmarks.page_pool import SECTION, WORDS, pool_section
from benchmarks.suite.pool_in_vllm.bench import PoolBenchPlan, bench_pools, run_figures
from benchmarks.suite.pool_in_vllm.fleet import GroupedVllm
from benchmarks.suite.pool_in_vllm.play import CacheCounts, Played, cache_counts, play
from benchmarks.suite.pool_in_vllm.pools import POOL_NAMES, POOLS, Pool, PoolPlace, listens
from benchmarks.suite.pool_in_vllm.versions import versions_of
from benchmarks.suite.pool_in_vllm.workload import SHAPES, PoolWorkload, prefixes_of
from moonpool_lab.demo.local_server import ServerError, free_port, is_alive
from moonpool_lab.trial.answer import Answer
from moonpool_lab.trial.tally import Phase, counts_of
from tests.http_server import QuietHandler, serving
from tests.processes import children

AGENTS = SHAPES["agents"]


def test_the_command_offers_every_pool_and_workload() -> None:
    assert POOL_CHOICES == POOL_NAMES == tuple(POOLS) == tuple(WORDS)
    assert tuple(SHAPES) == WORKLOAD_CHOICES


# Questions:


def test_all_rows_are_asked_the_same() -> None:
    assert PoolWorkload(AGENTS, 3).calls == PoolWorkload(AGENTS, 3).calls
    assert PoolWorkload(AGENTS, 3).calls != PoolWorkload(AGENTS, 4).calls


def test_turns_come_in_order_and_repeat_what_was_said() -> None:
    calls = PoolWorkload(AGENTS, 0).calls
    for session in range(AGENTS.sessions):
        mine = [call for call in calls if call.session == session]
        assert [call.turn for call in mine] == list(range(AGENTS.turns))
        for before, after in itertools.pairwise(mine):
            assert after.question.text.startswith(before.question.text)
            assert before.target != after.target  # differs, otherwise no pool would be needed


def test_each_question_has_its_code_and_agents_share_a_beginning() -> None:
    workload = PoolWorkload(AGENTS, 0)
    assert all(call.question.fact in call.question.text for call in workload.calls)
    beginnings = {call.question.messages[0] for call in workload.calls}
    assert len(beginnings) == 1
    chats = PoolWorkload(SHAPES["conversations"], 0)
    assert len({call.question.messages[0] for call in chats.calls}) == chats.shape.sessions


def test_the_last_calls_are_one_of_each_session() -> None:
    last = PoolWorkload(AGENTS, 0).last_calls()
    assert sorted(call.session for call in last) == list(range(AGENTS.sessions))


def test_distinct_and_known_tokens_are_of_whole_blocks() -> None:
    one, longer, other = [1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9, 9], [9, 2, 3, 4]
    found = prefixes_of([one, longer, other], 2)
    assert found.prompt_tokens == 16
    assert found.distinct_tokens == 2 * (2 + 1 + 2)
    assert found.known_tokens == 4
    assert found.longest_tokens == 7


def test_a_prompt_asked_again_computes_its_last_token() -> None:
    assert prefixes_of([[1, 2, 3, 4], [1, 2, 3, 4]], 2).known_tokens == 2


# How a round is played:

SSE = (
    b'data: {"choices": [{"text": " yes", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 8,'
    b' "prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
)
METRICS = (
    b"# HELP vllm:prefix_cache_hits_total x\n"
    b'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0\n'
    b'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0\n'
    b'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 70.0\n'
    b'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 20.0\n'
)


@contextmanager
def _servers(number: int) -> Iterator[tuple[list[str], list[tuple[int, str]]]]:
    """Yields the servers' URLs, and the questions: (server, prompt)."""
    asked: list[tuple[int, str]] = []

    def handler(place: int) -> type[QuietHandler]:
        class Handler(QuietHandler):
            def do_POST(self) -> None:
                assert self.headers["connection"] == "close"
                asked.append((place, self.read_json()["prompt"]))
                self.answer(SSE, kind="text/event-stream")

            def do_GET(self) -> None:
                self.answer(METRICS, kind="text/plain")

        return Handler

    with ExitStack() as stack:
        yield (
            [f"http://{stack.enter_context(serving(handler(place)))}" for place in range(number)],
            asked,
        )


def test_each_turn_goes_to_its_vllm_after_the_one_before() -> None:
    calls = PoolWorkload(AGENTS, 0).calls
    with _servers(2) as (urls, asked):
        played, seconds = asyncio.run(play(urls, "m", calls, 8, 60))
    assert len(played) == len(calls) == len(asked)
    target_of = {call.question.text: call.target for call in calls}
    assert all(place == target_of[prompt] for place, prompt in asked)
    order = {prompt: at for at, (_, prompt) in enumerate(asked)}
    for call in calls:
        later = [c for c in calls if (c.session, c.turn) == (call.session, call.turn + 1)]
        assert all(order[c.question.text] > order[call.question.text] for c in later)
    figures = run_figures(played, seconds, CacheCounts(100, 30, 20))
    assert figures["answered"] == len(calls)
    assert figures["hit_ratio"] == 0.5
    assert (figures["local_hit_ratio"], figures["pool_hit_ratio"]) == (0.3, 0.2)
    assert figures["first_ttft_s"]["mean"] > 0


def test_a_server_that_is_gone_is_an_error_of_the_answer() -> None:
    calls = PoolWorkload(AGENTS, 0).calls[:1]
    played, _ = asyncio.run(play([f"http://127.0.0.1:{free_port()}"], "m", calls, 1, 5))
    assert played[0].answer.outcome == "error"
    assert played[0].ttft_s == 0


def test_counters_are_summed_over_vllms() -> None:
    with _servers(2) as (urls, _):
        found = cache_counts(urls)
    assert found == CacheCounts(200, 60, 40)
    assert found.since(CacheCounts(100, 30, 20)) == CacheCounts(100, 30, 20)


def test_latencies_of_first_and_later_turns_are_apart() -> None:
    calls = PoolWorkload(AGENTS, 0).calls
    first = next(call for call in calls if not call.turn)
    later = next(call for call in calls if call.turn)
    answered = Answer(prompt_tokens=10, cached_tokens=5)
    played = [
        Played(first, answered, 4.0),
        Played(later, answered, 1.0),
        Played(later, answered, 3.0),
        Played(later, Answer(outcome="hung"), 0.0),
    ]
    figures = run_figures(played, 2.0, CacheCounts())
    assert figures["first_ttft_s"] == {"mean": 4.0, "p90": 4.0}
    assert figures["returning_ttft_s"] == {"mean": 2.0, "p90": 3.0}
    assert (figures["requests"], figures["answered"]) == (4, 3)
    assert figures["requests_per_s"] == 1.5


# Pools:


class _WebPool(Pool):
    """A process that listens, in place of a pool."""

    def __init__(self, place: PoolPlace, command: Sequence[str] = ()) -> None:
        super().__init__(place)
        self.port = free_port()
        self._command = command or (sys.executable, "-m", "http.server", str(self.port))

    def commands(self) -> Sequence[Sequence[str]]:
        return (self._command,)

    def is_ready(self, number: int) -> bool:
        return listens(self.port)


def test_a_pool_is_killed_and_starts_again_at_the_same_port(tmp_path: Path) -> None:
    pool = _WebPool(PoolPlace(sys.executable, tmp_path, 1 << 30, 32))
    others = children()
    pool.start()
    [first] = children() - others
    pool.kill()
    assert not is_alive(first)
    assert not pool.is_ready(0)
    pool.start()
    assert pool.is_ready(0)
    pool.stop()


def test_a_pool_that_ends_says_its_last_words(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no memory left')")
    pool = _WebPool(PoolPlace(sys.executable, tmp_path, 1 << 30, 32), command)
    with pytest.raises(ServerError, match="no memory left"):
        pool.start()
    pool.stop()


@pytest.mark.parametrize("name", POOL_NAMES)
def test_vllm_is_told_its_connector(name: str, tmp_path: Path) -> None:
    pool = POOLS[name](PoolPlace(sys.executable, tmp_path, 1 << 30, 32))  # type: ignore[index]
    connector = pool.connector()
    if name == "none":
        assert connector is None
        return
    assert connector is not None
    assert connector["kv_role"] == "kv_both"
    json.dumps(connector)
    assert all(isinstance(value, str) for value in pool.environment().values())


def test_a_peer_that_is_not_installed_is_told_in_one_line(tmp_path: Path) -> None:
    for name, advice in (("lmcache", "lmcache==0.5.6"), ("mooncake", "non-cuda")):
        place = PoolPlace(str(tmp_path / "python"), tmp_path, 1 << 30, 32)
        with pytest.raises(ServerError, match=advice):
            POOLS[name](place).start()  # type: ignore[index]


def test_without_a_vllm_the_command_ends_with_what_is_missing(tmp_path: Path) -> None:
    plan = PoolBenchPlan(model=str(tmp_path), pythons={"none": str(tmp_path / "python")})
    with pytest.raises(ServerError, match="--peer-python"):
        bench_pools(plan, lambda text: None, lambda found: None)


def test_versions_are_those_of_each_python() -> None:
    assert versions_of({"none": sys.executable})["none"]["torch"]
    assert versions_of({"none": "/bin/false"}) == {"none": {}}


# The table:

FIGURES = {
    "returning_ttft_s": {"mean": 0.5, "p90": 0.9},
    "first_ttft_s": {"mean": 1.5, "p90": 1.9},
    "local_hit_ratio": 0.25,
    "pool_hit_ratio": 0.5,
    "requests_per_s": 2.0,
}


def _phase(**counts: Any) -> Phase:
    phase = Phase(answered=100, asked=100, prompt_tokens=1000, cached_tokens=800)
    phase.kinds["right"] = 100
    for name, value in counts.items():
        setattr(phase, name, value)
    return phase


def _row(absent: str = "", more_differing: float = 1.0, **phases: Phase) -> dict[str, Any]:
    counted = {
        name: counts_of(phases.get(name, _phase())) for name in ("load", "after_one", "after_all")
    }
    return {
        "absent": absent,
        "median": FIGURES,
        "rounds": [FIGURES],
        "p_more_differing_than_twin": more_differing,
        **counted,
    }


def _found(rows: dict[str, Any]) -> dict[str, Any]:
    prefixes = {"prompt_tokens": 1000, "distinct_tokens": 300, "known_tokens": 700}
    workload = {"prefixes": prefixes, "kv_tokens": 100, "sessions": 2, "turns": 3, "rows": rows}
    origin = {"command": "moonpool bench pool-in-vllm", "commit": "c", "machine": "m"}
    return {
        "workloads": {"agents": workload},
        "versions": {"lmcache": {"lmcache": "0.5.6"}},
        "origin": origin,
    }


def _line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {WORDS[name]} |"))


def test_a_row_without_a_fault_says_so() -> None:
    text = pool_section(_found({"none": _row(), "moonpool": _row()}))
    assert _line(text, "moonpool").endswith("| 0 of 100 | 80%, 80% | nothing found |")
    assert "70% of the prompt tokens could be hits" in text
    assert "lmcache 0.5.6" in text


def test_the_table_says_what_each_got_wrong() -> None:
    wrong = _phase()
    wrong.kinds.update({"right": -8, "wrong": 5, "missing": 3})
    wrong.foreign = 2
    wrong.failed["hung"] = 1
    lost = _phase(cached_tokens=0)
    rows = {
        "none": _row(),
        "lmcache": _row(load=wrong, after_all=wrong, more_differing=0.001),
        "mooncake": _row(after_one=lost, after_all=lost),
        "offload": {**_row(absent="needs | CUDA"), "median": {}},
    }
    text = pool_section(_found(rows))
    lmcache = _line(text, "lmcache")
    assert "2 answers with text of others under load" in lmcache
    assert "8 of 100 answers wrong under load" in lmcache
    assert "8 of 100 answers wrong of all" not in lmcache
    assert "8 of 100 answers wrong after `kill -9` of all" in lmcache
    assert "1 hung under load" in lmcache
    assert "8 answers differ under load, 0 without a pool" in lmcache
    assert "nothing found again after `kill -9` of one" in _line(text, "mooncake")
    assert "does not run here: needs / CUDA" in _line(text, "offload")


def test_the_page_keeps_what_was_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, result = tmp_path / "pool.md", tmp_path / "pool.json"
    page.write_text(f"# By hand\n\n{SECTION.begin}\nformer table\n{SECTION.end}\n\nThe end.\n")
    result.write_text(json.dumps(_found({"none": _row()})))
    monkeypatch.setattr(sys, "argv", ["page_pool", "--check"])
    assert page_pool.main(page, result) == 1
    monkeypatch.setattr(sys, "argv", ["page_pool"])
    assert page_pool.main(page, result) == 0
    text = page.read_text()
    assert text.startswith("# By hand\n") and text.endswith("The end.\n") and "former" not in text
    monkeypatch.setattr(sys, "argv", ["page_pool", "--check"])
    assert page_pool.main(page, result) == 0


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        SECTION.within("# By hand\n", "table")


# The fleet:


class _ListeningVllm(GroupedVllm):
    """A process with a child in its group, in place of a vLLM."""

    def __init__(self, folder: Path) -> None:
        self._child = folder / "child"
        (folder / "vllm").touch()  # one of the packages that a Python must have
        super().__init__(str(folder / "python"), "model", "0", {})
        script = (
            "import subprocess, sys, pathlib;"
            "child = subprocess.Popen([sys.executable, '-m', 'http.server', sys.argv[1]]);"
            "pathlib.Path(sys.argv[2]).write_text(str(child.pid)); child.wait()"
        )
        self._arguments = [sys.executable, "-c", script, str(self.port), str(self._child)]

    def _is_healthy(self) -> bool:
        return listens(self.port)

    def child_pid(self) -> int:
        return int(self._child.read_text())


@pytest.mark.parametrize("end", [GroupedVllm.kill, GroupedVllm.stop])
def test_all_processes_of_a_vllm_end(end: Any, tmp_path: Path) -> None:
    vllm = _ListeningVllm(tmp_path)
    vllm.__enter__()
    child = vllm.child_pid()
    assert is_alive(child)
    end(vllm)
    until_s = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert not is_alive(vllm.pid)

"""Tests which answers the trial of the pool counts as wrong, and which processes it kills."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.pool_trial import kinds_of_kills, verdict
from benchmarks.suite.pool_in_vllm.judge import TokenAnswer, counts_of, judge
from benchmarks.suite.pool_in_vllm.pools import PoolPlace
from benchmarks.suite.pool_in_vllm.trial_cluster import (
    DAMAGE_STEP_BYTES,
    TrialPool,
    TrialShape,
    damage_file,
)
from moonpool_lab.demo.local_server import ServerError
from tests.http_server import QuietHandler, serving

TIE_NATS = 0.5


class Judge(QuietHandler):
    """Answers like vLLM: after each token, the next higher token is the likeliest, the token after
    that is nearly as likely, and all other tokens are unlikely."""

    def do_POST(self) -> None:
        prompt = self.read_json()["prompt"]
        places: list[Any] = [None]
        for before, token in pairwise(prompt):
            place = {str(before + 1): {"logprob": -0.1}}
            place.setdefault(str(token), {"logprob": -0.3 if token == before + 2 else -9.0})
            places.append(place)
        self.answer(msgspec.json.encode({"choices": [{"prompt_logprobs": places}]}))


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Judge) as place:
        yield f"http://{place}"


def answer(*tokens: int, foreign: tuple[str, ...] = ()) -> TokenAnswer:
    return TokenAnswer("q", "m", [5, 6, 7], list(tokens), "text", list(foreign))


def test_an_answer_is_judged_behind_a_near_tie_to_its_end(url: str) -> None:
    right = answer(8, 9, 10)
    tie = answer(8, 10, 11)
    wrong_behind_a_tie = answer(8, 10, 40)
    judged = judge({"m": url}, [right, tie, wrong_behind_a_tie, answer()])
    assert [one.is_wrong(TIE_NATS) for one in judged] == [False, False, True, False]
    assert judged[2].at_token == 2
    counts = counts_of(judged, TIE_NATS)
    assert (counts["answers"], counts["wrong"], counts["near_ties"]) == (4, 1, 1)
    assert counts["widest_near_tie_nats"] == pytest.approx(0.2)


def test_text_of_another_conversation_is_wrong_whatever_its_tokens_are(url: str) -> None:
    counts = counts_of(judge({"m": url}, [answer(8, foreign=("ABCDEF",))]), TIE_NATS)
    assert (counts["wrong"], counts["foreign"]) == (1, 1)


def counted(answers: int, wrong: int, foreign: int = 0) -> dict[str, Any]:
    return {"answers": answers, "wrong": wrong, "foreign": foreign}


@pytest.mark.long
@pytest.mark.parametrize(
    ("pool", "alone", "given_up", "lines"),
    [
        (counted(100, 0), counted(100, 0), [], 0),
        (counted(100, 1), counted(100, 0), [], 1),
        (counted(100, 3), counted(100, 2), [], 0),  # batches alone explain this many differences
        (counted(100, 40), counted(100, 2), [], 1),
        (counted(100, 2, foreign=1), counted(100, 2), [], 1),
        (counted(100, 0), counted(100, 0), ["q: cut"], 1),
    ],
)
def test_what_is_proven(
    pool: dict[str, Any], alone: dict[str, Any], given_up: list[str], lines: int
) -> None:
    assert len(list(verdict(pool, alone, given_up))) == lines


def test_each_kind_is_killed_and_most_kills_are_the_pools() -> None:
    rng = random.Random(1)
    assert set(kinds_of_kills(3, rng)) == {"pool", "vllm", "head"}
    many = kinds_of_kills(100, rng)
    assert len(many) == 100
    assert many.count("pool") > many.count("vllm") > many.count("head") > 0
    assert kinds_of_kills(0, rng) == []


def test_damage_changes_as_many_bytes_as_it_says(tmp_path: Path) -> None:
    file, size = tmp_path / "arena", 9 * DAMAGE_STEP_BYTES
    file.write_bytes(bytes(size))
    assert damage_file(file, random.Random(1), 1.0) == 9
    changed = [number for number, byte in enumerate(file.read_bytes()) if byte]
    assert [number // DAMAGE_STEP_BYTES for number in changed] == list(range(9))
    assert damage_file(file, random.Random(1), 0.0) == 0
    assert damage_file(tmp_path / "gone", random.Random(1), 1.0) == 0


def test_the_disk_is_filled_by_a_file_that_is_not_the_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a large file system, the trial must not fill the disk, because other users may need it."""
    shape = TrialShape("python", ("m",), 1, 1, 1, 1, "1GiB", str(tmp_path))
    pool = TrialPool(PoolPlace("python", tmp_path, 1, 32), shape)
    at = "benchmarks.suite.pool_in_vllm.trial_cluster"
    monkeypatch.setattr(f"{at}.MAX_FILLED_BYTES", 0)
    with pytest.raises(ServerError, match="mount a small tmpfs"):
        pool.fill_disk()
    monkeypatch.setattr(f"{at}.MAX_FILLED_BYTES", 1 << 60)
    # From the second piece on, writing fails like on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DAMAGE_STEP_BYTES + 1, limits[1]))
    try:
        pool.fill_disk()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == DAMAGE_STEP_BYTES + 1
    assert pool.damage(random.Random(0), 1.0) == 0
    pool.free_disk()
    assert list(tmp_path.iterdir()) == []

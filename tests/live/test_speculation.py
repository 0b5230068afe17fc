"""Clusters with drafts give the answers of the cluster without drafts, bit for bit, in all
arrangements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import answer_while_killing, run_command
from tests.live.waiting import wait_until

NGRAM = ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']
DRAFT_MODEL = "random:hidden=32,layers=1,heads=2,kv_heads=1,inter=64,vocab=300"
BY_MODEL = [
    "--speculative-config",
    json.dumps({"method": "draft_model", "model": DRAFT_MODEL, "prompt_lookup_min": 1}),
]
QUOTED = [(7 * i) % 250 for i in range(40)]
BODIES: list[dict[str, Any]] = [
    {"prompt": [9] * 60, "temperature": 0, "max_tokens": 200, "ignore_eos": True},
    {"prompt": QUOTED * 4, "temperature": 0, "max_tokens": 90, "logprobs": 2},
    {"prompt": QUOTED * 3, "temperature": 0.2, "seed": 4, "max_tokens": 60, "top_p": 0.9},
    {"prompt": QUOTED * 2, "temperature": 0, "frequency_penalty": 0.4, "max_tokens": 60},
    {"prompt": [5, 6] * 50, "temperature": 0, "min_tokens": 30, "max_tokens": 64},
    {"prompt": [9] * 60, "temperature": 0, "max_tokens": 120, "ignore_eos": True, "n": 3},
]
LONG = {"prompt": QUOTED * 4, "max_tokens": 600, "temperature": 0.15, "seed": 5, "ignore_eos": True}


def answers(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the choices of an answer, and the number of its tokens."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"], (usage["prompt_tokens"], usage["completion_tokens"])


def total(client: httpx.Client, name: str) -> float:
    return total_in(client.get("/metrics").text, name)


def total_in(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}_total\{{[^}}]*\}} (\S+)$", metrics, re.M)
    assert found is not None, name
    return float(found[1])


def check(url: str, http: httpx.Client) -> None:
    """Sends both clusters the same call, with a stop string that the answer contains."""
    with httpx.Client(base_url=url, timeout=120) as client:
        first = answers(http, BODIES[0])[0][0]["text"]
        stopped = BODIES[0] | {"stop": [first[50:53]]}
        for body in (*BODIES, stopped):
            for _ in range(2):  # the second time, drafts come from cached blocks
                assert answers(client, body) == answers(http, body), body
        name = "vllm:spec_decode_num_accepted_tokens"
        wait_until(lambda: total(client, name))  # until a heartbeat brings the counters
        text = client.get("/metrics").text
        assert total_in(text, name) <= total_in(text, "vllm:spec_decode_num_draft_tokens")
        assert total(client, "vllm:spec_decode_num_drafts") > 0


@pytest.fixture(scope="module")
def split() -> Iterator[LocalServer]:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "2", *SMALL, *NGRAM]) as server:
        yield server


@pytest.mark.long
def test_prefill_and_decode(split: LocalServer, http: httpx.Client) -> None:
    check(split.url, http)


@pytest.fixture(scope="module")
def guessed() -> Iterator[LocalServer]:
    """Serves with a draft model that has the shape of the first layer, in addition to lookups."""
    arrangement = ["--prefill", "1", "--decode", "1"]
    with LocalServer([MODEL, *arrangement, *SMALL, *BY_MODEL]) as server:
        yield server


@pytest.mark.long
def test_a_draft_model(guessed: LocalServer, http: httpx.Client) -> None:
    check(guessed.url, http)


@pytest.mark.long
def test_a_draft_model_killed_in_the_middle(guessed: LocalServer, http: httpx.Client) -> None:
    expected = answers(http, LONG)[0][0]["text"]
    with httpx.Client(base_url=guessed.url, timeout=120) as client:
        got = answer_while_killing(client, "decode", body=LONG)
        assert got["choices"][0]["text"] == expected


def test_a_stream_brings_the_same_text(split: LocalServer, http: httpx.Client) -> None:
    body = BODIES[0] | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=split.url, timeout=120) as client:
        texts = []
        for one in (client, http):
            lines = one.post("/v1/completions", json=body).text.splitlines()
            texts.append("".join(re.findall(r'"text":\s*"((?:[^"\\]|\\.)*)"', "".join(lines))))
            assert any('"completion_tokens":200' in line.replace(" ", "") for line in lines)
    assert texts[0] == texts[1] and texts[0]


@pytest.mark.long
def test_killed_in_the_middle(split: LocalServer, http: httpx.Client) -> None:
    expected = answers(http, LONG)[0][0]["text"]
    with httpx.Client(base_url=split.url, timeout=120) as client:
        for role in ("decode", "prefill"):
            got = answer_while_killing(client, role, body=LONG)
            assert got["choices"][0]["text"] == expected, role


@pytest.mark.long
@pytest.mark.parametrize(
    "arrangement",
    [
        ["--mixed", "1"],
        ["--prefill", "1", "--decode", "1", "--decode-pipeline-parallel-size", "2"],
        ["--prefill", "1", "--decode", "1", "--attention", "2"],
    ],
    ids=lambda line: line[-2],
)
def test_other_arrangements(arrangement: list[str], http: httpx.Client) -> None:
    with LocalServer([MODEL, *arrangement, *SMALL, *NGRAM]) as server:
        check(server.url, http)


SPLIT = ["--prefill", "1", "--decode", "1"]
ONLY_BY_MODEL = [
    "--speculative-config",
    json.dumps(
        {
            "method": "draft_model",
            "model": DRAFT_MODEL,
            "prompt_lookup_min": 32,
            "prompt_lookup_max": 32,
        }
    ),
]
"""A body for which only the draft model makes drafts: its text does not repeat 32 tokens, and no
block is cached."""
FRESH = {"prompt": QUOTED, "temperature": 1.0, "seed": 6, "max_tokens": 90, "ignore_eos": True}
PLAIN_RANKS = ["--mixed", "1", "--tensor-parallel-size", "2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrangement", "plain"),
    [
        ([*SPLIT, "--decode-pipeline-parallel-size", "2"], []),
        ([*SPLIT, "--pipeline-parallel-size", "2"], []),
        ([*SPLIT, "--decode-tensor-parallel-size", "2"], PLAIN_RANKS),
        ([*SPLIT, "--attention", "2"], []),
        ([*SPLIT, "--attention", "2", "--attention-partition", "head"], []),
    ],
    ids=["stages", "stages of prefill", "ranks", "attention workers", "by heads"],
)
def test_a_draft_model_in_other_arrangements(
    arrangement: list[str], plain: list[str], http: httpx.Client
) -> None:
    """Answers must be equal in each arrangement. In one of them, the decode instance is killed
    during an answer. Ranks are compared with ranks."""
    with LocalServer([MODEL, *arrangement, *SMALL, *ONLY_BY_MODEL]) as server:
        if plain:
            with (
                LocalServer([MODEL, *plain, *SMALL]) as other,
                httpx.Client(base_url=other.url, timeout=120) as truth,
            ):
                check_with_a_kill(server, truth)
        else:
            check_with_a_kill(server, http)


def check_with_a_kill(server: LocalServer, truth: httpx.Client) -> None:
    expected = answers(truth, LONG)[0][0]["text"]
    with httpx.Client(base_url=server.url, timeout=120) as client:
        assert answers(client, FRESH) == answers(truth, FRESH)

        def guessed() -> float:
            # again, because step times of a busy machine may make a draft seem too dear
            answers(client, FRESH)
            return total(client, "vllm:spec_decode_num_draft_tokens")

        wait_until(guessed, "the draft model has not guessed")
        check(server.url, truth)
        got = answer_while_killing(client, "decode", body=LONG)
        assert got["choices"][0]["text"] == expected
    check(server.url, truth)


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        [MODEL, "--dtype", "bfloat16"],
        [MODEL, "--quantization", "int8", "--dtype", "bfloat16"],
        [MODEL, "--mixed", "1", "--tensor-parallel-size", "2"],
    ],
    ids=lambda line: line[-1],
)
def test_other_numbers(model: list[str]) -> None:
    """With other numbers of drafts, the answers must equal those of the same model without
    drafts."""
    with (
        LocalServer([*model, *SMALL]) as plain,
        LocalServer([*model, *SMALL, *NGRAM]) as server,
        httpx.Client(base_url=plain.url, timeout=120) as http,
    ):
        check(server.url, http)


@pytest.mark.long
def test_structured_answers() -> None:
    """Uses the built-in model, which ends its answers and continues what it has read."""
    names = ["ann", "bob", "cat", "dan"] * 4
    word = json.dumps({"names": names})
    body = {
        "messages": [{"role": "user", "content": f"{word} {word} Say it again: {word}"}],
        "temperature": 0.2,
        "seed": 3,
        "max_tokens": 200,
        "structured_outputs": {"json": {"enum": [{"names": names}, {"names": names[::-1]}]}},
    }
    found = []
    drafts = json.dumps({"method": "draft_model", "model": DRAFT_MODEL.replace("300", "259")})
    for options in ((), NGRAM, ("--speculative-config", drafts)):
        with (
            LocalServer(["--mixed", "1", *options]) as server,
            httpx.Client(base_url=server.url, timeout=120) as client,
        ):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found.append((answer.json()["choices"], answer.json()["usage"]))
            # Without options, the predicted gain of drafts decides whether they are used.
            if not options:
                assert total(client, "vllm:spec_decode_num_draft_tokens") == 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-config", "ngram"], ["--speculative-config", "JSON"]),
        (["--speculative-config", '{"method": "eagle"}'], ["eagle", "speculative_config"]),
        (["--speculative-config", '{"method": "ngram", "k": 3}'], ["k", "speculative_config"]),
        (
            ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 9}'],
            ["prompt_lookup_min", "at most prompt_lookup_max, which is 4"],
        ),
        (
            ["--speculative-config", '{"method": "draft_model"}'],
            ["speculative_config.model", "the draft model's name"],
        ),
        (
            ["--speculative-config", '{"method": "ngram", "model": "x"}'],
            ["speculative_config.model", "left out"],
        ),
        (
            ["--speculative-config", '{"method": "draft_model", "model": "moonpool/induction"}'],
            ["another vocabulary", "259 tokens, not 300", "the same tokenizer"],
        ),
        (
            ["--speculative-config", '{"method": "draft_model", "model": "/nowhere"}'],
            ["/nowhere", "does not exist"],
        ),
        ([*NGRAM, "--device", "cuda"], ["engine.speculative_config", "cpu"]),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], words: list[str]) -> None:
    done = run_command("serve", MODEL, *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), last

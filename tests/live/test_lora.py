"""Real processes serve several adapters at once: by name, each adapter with a cache of its own."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.differential.adapters import write_adapter
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import run_command

LINEARS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.down_proj": (64, 128),
    }.items()
}  # fmt: skip
NAMES = ("base", "poet", "org/judge")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "poet", LINEARS, 4, seed=1)
    write_adapter(folder / "judge", LINEARS, 9, seed=2, use_rslora=True)
    return [f"poet={folder / 'poet'}", f"org/judge={folder / 'judge'}"]


def server(modules: list[str], *more: str) -> LocalServer:
    own = ["--served-model-name", "base", "--lora-modules", *modules]
    return LocalServer([MODEL, *own, *SMALL, *more])


@pytest.fixture(scope="module")
def alone(modules: list[str]) -> Iterator[dict[str, list[str]]]:
    """Returns the answers of one process without a cache, by model."""
    with server(modules, "--mixed", "1", "--no-enable-prefix-caching") as up:
        yield {name: [ask(up, name, prompt) for prompt in PROMPTS] for name in NAMES}


PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((5, 150, 300))]


def ask(up: LocalServer, name: str, prompt: list[int], **more: Any) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 3}
    answer = fresh.post(f"{up.url}/v1/completions", json=body | more, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["model"] == name
    return json.dumps(found["choices"][0]["text"])


def test_adapters_answer_as_alone(alone: dict[str, list[str]], modules: list[str]) -> None:
    """Whether all models answer right at once, twice, with prefixes of each other's prompts in the
    cache."""
    for i in range(len(PROMPTS)):
        assert len({alone[name][i] for name in NAMES}) == 3
    with server(modules, "--prefill", "1", "--decode", "1") as up, ThreadPoolExecutor(9) as pool:
        asked = [(name, i) for name in NAMES for i in range(len(PROMPTS))] * 2
        answers = list(pool.map(lambda one: ask(up, one[0], PROMPTS[one[1]]), asked))
        assert answers == [alone[name][i] for name, i in asked]
        with httpx.Client(base_url=up.url, timeout=60) as http:
            cached = {}
            for name in NAMES:
                body = {"model": name, "prompt": PROMPTS[2], "max_tokens": 1}
                # asks twice, because a busy decode instance may have computed all prompts the first
                # time
                for _ in range(2):
                    usage = http.post("/v1/completions", json=body).json()["usage"]
                cached[name] = usage["prompt_tokens_details"]["cached_tokens"]
            assert min(cached.values()) >= 256, cached
            listed = http.get("/v1/models").json()["data"]
            assert [(m["id"], m["parent"]) for m in listed] == [
                ("base", None), ("poet", "base"), ("org/judge", "base"),
            ]  # fmt: skip
            assert http.get("/v1/models/org/judge").json()["root"].endswith("judge")
            vectors = [
                http.post("/v1/embeddings", json={"model": name, "input": "a"}).json()["data"]
                for name in NAMES
            ]
            assert vectors[0] != vectors[1] != vectors[2]
            unknown = http.post("/v1/completions", json={"model": "other", "prompt": "a"})
            assert unknown.status_code == 404 and "poet" in unknown.text


@pytest.mark.long
def test_no_adapter_reads_anothers_cache(modules: list[str]) -> None:
    with server(modules, "--mixed", "1") as up, httpx.Client(base_url=up.url, timeout=60) as http:
        cached = []
        for name in (*NAMES, *NAMES):
            body = {"model": name, "prompt": PROMPTS[2], "max_tokens": 1}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= 256, cached


@pytest.mark.long
@pytest.mark.parametrize("way", [["--pipeline-parallel-size", "2"], ["--attention", "2"]])
def test_other_ways_and_a_killed_instance(
    way: list[str], alone: dict[str, list[str]], modules: list[str]
) -> None:
    with (
        server(modules, "--prefill", "1", "--decode", "2", *way) as up,
        ThreadPoolExecutor(6) as pool,
    ):
        long = {"max_tokens": 300, "ignore_eos": True}
        before = [ask(up, name, PROMPTS[1], **long) for name in NAMES]
        assert [ask(up, name, PROMPTS[1]) for name in NAMES] == [alone[n][1] for n in NAMES]
        running = [pool.submit(ask, up, name, PROMPTS[1], **long) for name in NAMES * 2]
        with httpx.Client(base_url=up.url, timeout=60) as http:
            instances = http.get("/cluster").json()["instances"]
        victim = next(i["pid"] for i in instances if i["role"] == "decode")
        os.kill(victim, signal.SIGKILL)
        assert [future.result() for future in running] == before * 2


@pytest.mark.long
def test_ranks_agree_with_themselves_and_a_killed_instance(modules: list[str]) -> None:
    ranks = ("--prefill", "1", "--decode", "2", "--tensor-parallel-size", "2")
    long = {"max_tokens": 200, "ignore_eos": True}
    alone = ("--mixed", "1", "--tensor-parallel-size", "2", "--no-enable-prefix-caching")
    with server(modules, *alone) as up:
        expected = [ask(up, name, PROMPTS[1], **long) for name in NAMES]
    assert len(set(expected)) == 3
    with server(modules, *ranks) as up, ThreadPoolExecutor(6) as pool:
        running = [pool.submit(ask, up, name, PROMPTS[1], **long) for name in NAMES * 2]
        with httpx.Client(base_url=up.url, timeout=60) as http:
            instances = http.get("/cluster").json()["instances"]
        victim = next(i["pid"] for i in instances if i["role"] == "decode")
        os.kill(victim, signal.SIGKILL)
        assert [future.result() for future in running] == expected * 2


@pytest.mark.long
def test_bad_adapters_end_serve_with_one_line(tmp_path: Path) -> None:
    write_adapter(tmp_path, LINEARS, 4, 1, use_dora=True)
    for flags, words in (
        (["--lora-modules", f"x={tmp_path}"], "use_dora"),
        (["--lora-modules", "x=/nowhere"], "/nowhere"),
        (["--lora-modules", "nothing"], "NAME=PATH"),
        (["--lora-modules", f"x={tmp_path}", f"x={tmp_path}"], "differ"),
    ):
        done = run_command("serve", MODEL, *flags)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert words in done.stderr.strip().splitlines()[-1], done.stderr

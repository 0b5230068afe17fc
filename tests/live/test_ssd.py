"""Tests that blocks that left DRAM come back from the disk, before and after a kill -9, and are
never wrong."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.calibrate import StepSample
from moonpool_engine.engine.device_choice import resolve_dtype
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.storage.folder import instance_folder
from moonpool_engine.worker.profile_store import profile_path
from tests.cli_runner import succeed
from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL
from tests.live.waiting import WAIT_S

NUM_PROMPTS = 30
PROMPT_TOKENS = 200
BLOCK_TOKENS = 16
DRAM = ["--kv-tokens", "4096", "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", "128"]


class Talk:
    """Sends the same long prompts again and again, and compares the answers with the first ones,
    which were computed without a cache."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        rng = random.Random(7)
        self.prompts = [
            [rng.randrange(300) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
        ]
        self.expected: list[str] = []

    def ask(self, number: int) -> tuple[str, int]:
        """Returns the answer, and how many of the prompt's tokens were cached."""
        body = {
            "prompt": self.prompts[number],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer: dict[str, Any] = self.http.post("/v1/completions", json=body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    def round(self) -> int:
        """Sends all prompts, asserts that the answers equal the first ones, and returns the number
        of cached tokens."""
        cached = 0
        for number in range(NUM_PROMPTS):
            text, tokens = self.ask(number)
            if len(self.expected) == number:
                self.expected.append(text)
            assert text == self.expected[number], number
            cached += tokens
        return cached

    def instance(self) -> dict[str, Any]:
        (found,) = self.http.get("/cluster").json()["instances"]
        return dict(found)

    def wait_for_counters(self, **least: float) -> dict[str, float]:
        """Waits for these values of the counters, which heartbeats bring once a second."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            counters: dict[str, float] = self.instance().get("counters", {})
            if all(counters.get(name, 0.0) >= value for name, value in least.items()):
                return counters
            time.sleep(0.1)
        raise AssertionError((least, counters))

    def restart(self) -> None:
        """Kills the worker and waits for its successor."""
        old = self.instance()["pid"]
        os.kill(old, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            instances = self.http.get("/cluster").json()["instances"]
            if instances and instances[0]["pid"] != old:
                return
            time.sleep(0.1)
        raise AssertionError("the killed worker did not come back")


PLAIN = [
    *(
        StepSample(kind="prefill", new_tokens=new, context_tokens=0, batch=1, seconds=1e-3 * new)
        for new in (16, 64, 128, 256, 512)
    ),
    *(
        StepSample(kind="decode", new_tokens=1, context_tokens=64 * n, batch=n, seconds=1e-3 * n)
        for n in (1, 2, 4, 8)
    ),
]
"""Step times by which a token takes 1 ms."""


def serve(folder: Path, config: Path, profile: Sequence[StepSample] = PLAIN) -> LocalServer:
    config.write_text('[pool]\nssd_admission = "always"\n')
    plant_profile(profile)
    ssd = [
        "--threads",
        "1",
        "--ssd-tokens",
        "65536",
        "--ssd-folder",
        str(folder),
        "--config",
        str(config),
    ]
    return LocalServer([MODEL, "--mixed", "1", *DRAM, *ssd])


def plant_profile(samples: Sequence[StepSample] = PLAIN) -> None:
    """A tiny model on a busy machine computes about as fast as a disk reads, so no block would be
    read. The workers therefore find the step times of a slower model."""
    model = open_model(MODEL, resolve_dtype("auto"))
    ops = choose_ops(model.dtype)
    engine = Engine(model, ops, empty_cache(make_layout(model, BLOCK_TOKENS, ops), 1))
    path = profile_path(engine, threads=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(list(samples)))
    later_s = time.time() + 3600
    os.utime(path, (later_s, later_s))


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def talk(
    cache_home: None, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Talk]:
    with serve(folder, tmp_path_factory.mktemp("config") / "c.toml") as server:
        talk = Talk(server.url)
        # all blocks are computed, and most of them are evicted from DRAM again
        assert talk.round() == 0
        yield talk


def test_what_left_dram_comes_back_from_the_disk(talk: Talk, folder: Path) -> None:
    cached = talk.round()
    most = NUM_PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
    assert cached > 0.5 * most
    counters = talk.wait_for_counters(ssd_read_blocks=1, ssd_written_blocks=1)
    assert counters["ssd_corrupt_slices"] == 0
    ssd = talk.instance()["ssd"]
    assert ssd["held"] + ssd["available"] == ssd["blocks"] == 65536 // BLOCK_TOKENS
    assert ssd["cached"] > 0 and not ssd["error"]
    metrics = talk.http.get("/metrics").text
    (line,) = [
        x for x in metrics.splitlines() if x.startswith("moonpool:ssd_bytes_total{") and "read" in x
    ]
    assert float(line.split()[-1]) > 0
    assert 'moonpool:tier_blocks{engine="' in metrics
    url = str(talk.http.base_url)
    for command in ("stat", "audit"):
        result = succeed("pool", command, "--url", url)
        assert "SSD" in result.output


def test_a_killed_worker_finds_its_blocks_again(talk: Talk) -> None:
    talk.restart()
    deadline = time.monotonic() + WAIT_S
    while not talk.instance()["indexed_blocks"]:
        assert time.monotonic() < deadline, "it announced nothing of what it had"
        time.sleep(0.05)
    assert talk.round() > 0
    counters = talk.wait_for_counters(ssd_read_blocks=1)
    assert counters["ssd_corrupt_slices"] == 0


def test_flipped_bits_cost_time_and_no_answer(talk: Talk, folder: Path) -> None:
    found = instance_folder(folder, "mixed-0")
    for path in sorted(found.glob("segment-*")):
        with path.open("r+b") as file:
            for offset in range(4096 + 100, path.stat().st_size, 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))
    talk.round()  # expects the answers of the first round
    counters = talk.wait_for_counters(ssd_corrupt_slices=1, corrupt_slices=1)
    assert counters["ssd_corrupt_slices"] > 0


@pytest.mark.long
def test_a_reset_empties_memory_and_disk(talk: Talk) -> None:
    talk.round()
    assert talk.instance()["ssd"]["cached"] and talk.instance()["indexed_blocks"]
    assert talk.http.post("/reset_prefix_cache").status_code == 200
    deadline = time.monotonic() + WAIT_S
    while (left := talk.instance())["indexed_blocks"] or left["ssd"]["cached"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert talk.ask(0) == (talk.expected[0], 0)


@pytest.mark.long
def test_a_folder_that_cannot_be_had_is_said_and_served_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serve(tmp_path / "file", tmp_path / "c.toml") as server:
        talk = Talk(server.url)
        assert talk.ask(0)[0] == talk.ask(0)[0]
        deadline = time.monotonic() + WAIT_S
        while "ssd" not in talk.instance() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert str(tmp_path / "file") in talk.instance()["ssd"]["error"]
        assert "serving without the SSD tier" in server.last_words(200)

"""Tests that an operator learns of a disk that returns damaged blocks: by a log line, a count, and
the file's name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_harness import Bench, key_of, make_layout

from moonpool.log_limit import LogLimit
from moonpool.protocol.transfer_events import LoadEnded
from moonpool.types import BlockId
from moonpool_engine.storage import store as store_module
from moonpool_engine.storage.folder import segments_in
from moonpool_engine.transfer.gate import LayerGate

LOGGER = logging.getLogger(store_module.__name__)
NUM_BLOCKS = 6
PAIRS = {slot: slot for slot in range(NUM_BLOCKS)}


class LayeredBench(Bench):
    """Makes the store's loads bring layer after layer."""


@pytest.fixture(autouse=True)
def _fresh_limit() -> None:
    for limit in LOGGER.filters:
        if isinstance(limit, LogLimit):
            limit.forget()


@pytest.fixture(params=["whole", "by layer"])
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    if request.param == "by layer":
        monkeypatch.setattr("moonpool_engine.storage.job.MIN_PART_BYTES", 4096)
    kind = LayeredBench if request.param == "by layer" else Bench
    bench = kind(tmp_path / "ssd", make_layout(4096 if request.param == "by layer" else 256))
    yield bench
    bench.store.close()


def load(bench: Bench) -> int:
    if not isinstance(bench, LayeredBench):
        return bench.get(PAIRS).num_blocks
    blocks = tuple(map(BlockId, range(NUM_BLOCKS)))
    bench.store.load("l", tuple(map(key_of, PAIRS)), tuple(PAIRS), blocks, LayerGate())
    while not isinstance(event := bench.events.get(timeout=60), LoadEnded):
        pass
    return event.num_blocks


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER.name and record.levelno == logging.WARNING
    ]


def flip_all(path: Path) -> None:
    """Flips a bit in each 4 KiB after the first 4 KiB, which may be a header."""
    with path.open("r+b") as file:
        for offset in range(4096 + 50, path.stat().st_size, 4096):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_damage_is_said_once_with_its_file_and_counted(
    bench: Bench, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(PAIRS)
    assert load(bench) == NUM_BLOCKS and not lines(caplog)
    assert bench.store.counts().damaged_blocks == 0
    paths = list(segments_in(bench.store.folder).values())
    for path in paths:
        if damage == "flipped":
            flip_all(path)
        else:
            os.truncate(path, 0)
    if damage == "deleted":
        bench.store.segments.close()
        for path in paths:
            path.unlink()
    assert load(bench) < NUM_BLOCKS
    told, counts = lines(caplog), bench.store.counts()
    assert told and all("damaged on disk" in line for line in told)
    named = " ".join(told)
    assert any(str(path) in named for path in paths)
    assert 1 <= counts.damaged_blocks <= NUM_BLOCKS
    assert counts.damaged_blocks == sum(int(line.split()[0]) for line in told)
    assert counts.failed_operations == 0, "the disk did what it was told"
    # Slots that were found damaged are void. A load ended at the first damaged slot, so it did not
    # check the others.
    for _ in PAIRS:
        load(bench)
    assert bench.store.counts().damaged_blocks <= NUM_BLOCKS, "each is counted once"


def test_a_disk_full_of_damage_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path / "ssd", num_slots=64, num_blocks=64)
    try:
        pairs = {slot: slot for slot in range(64)}
        bench.put(pairs)
        for path in segments_in(bench.store.folder).values():
            flip_all(path)
        for slot in pairs:
            bench.get({slot: slot})
        assert bench.store.counts().damaged_blocks > 20
        assert 1 <= len(lines(caplog)) <= 10
    finally:
        bench.store.close()


def test_a_read_that_fails_is_said(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(PAIRS)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.store.segments, "read", fails)
    assert load(bench) == 0
    assert bench.store.counts().failed_operations >= 1
    assert str(bench.store.folder) in " ".join(lines(caplog))

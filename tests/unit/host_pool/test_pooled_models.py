"""Tests which model is closed in favour of another when a space is opened."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.host_pool.messages import PROTOCOL, AttachRank
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.host_pool.pooled_models import HostPoolPlace, PooledModels
from moonpool_engine.host_pool.space_host import SpaceError

LAYOUT = BlockLayout("m", "bfloat16", 1, 3, 1, 64)


def attach(model: bytes) -> AttachRank:
    return AttachRank(
        protocol=PROTOCOL,
        group=model * 32,
        model=str(model),
        rank=0,
        num_ranks=1,
        block_tokens=16,
        layout=LAYOUT,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def pool_of(folder: Path, **more: object) -> PooledModels:
    place = {
        "socket_path": folder / "pool.sock",
        "memory_folder": folder / "memory",
        "dram_bytes": 1 << 20,
        "ssd_folder": None,
        "ssd_bytes": 0,
        "num_models": 1,
        "listen_host": "127.0.0.1",
        "secret": bytes(32),
    }
    return PooledModels(HostPoolPlace(**(place | more)), lambda group: None)  # type: ignore[arg-type]


def test_a_model_whose_space_is_being_opened_gives_way_to_none(folder: Path) -> None:
    async def both() -> None:
        models = pool_of(folder)
        first = asyncio.create_task(models.attach(attach(b"a")))
        second = asyncio.create_task(models.attach(attach(b"b")))
        with pytest.raises(SpaceError, match="a larger --models"):
            await second
        group, host = await first
        assert models.by_key == {b"a" * 32: group}
        assert Path(host.path).exists()
        # The model's client has gone, so this model is closed now.
        await models.attach(attach(b"b"))
        assert list(models.by_key) == [b"b" * 32]
        assert group.is_closed
        await models.close()

    asyncio.run(both())


def test_the_flags_of_the_pool_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def open_both() -> None:
        models = pool_of(folder, ssd_folder=tmp_path, ssd_bytes=1 << 60)
        await models.attach(attach(b"a"))
        await models.close()
        with pytest.raises(SpaceError, match="; lower --dram "):
            await pool_of(folder, dram_bytes=1 << 50).attach(attach(b"b"))

    asyncio.run(open_both())
    (line,) = [text for text in caplog.messages if "without its SSD" in text]
    assert "lower --ssd to" in line
    assert "pool." not in line

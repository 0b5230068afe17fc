"""`moonpool pool` verifies and clears a folder, and shows and checks a cluster's sums."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from moonpool.head.audit import audit_cluster
from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.store import open_store
from moonpool_engine.transfer.arena import Arena
from tests.cli_runner import invoke
from tests.http_server import QuietHandler, serving

LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
)
TIER = {
    "blocks": 10,
    "held": 3,
    "available": 7,
    "cached": 5,
    "owners": {"work:r/1": 3, "read:x": 1},
}
CLUSTER: dict[str, Any] = {
    "instances": [
        {
            "instance_id": "prefill-0",
            "pool": {**TIER, "block_bytes": 1 << 20},
            "ssd": {**TIER, "blocks": 40, "available": 37, "error": ""},
            "running": 1,
            "waiting": 0,
            "counters": {
                "ssd_read_bytes": 3e9,
                "ssd_read_seconds": 2.0,
                "ssd_damaged_blocks": 1234.0,
            },
        },
        {"instance_id": "decode-0", "pool": {"blocks": 10, "block_bytes": 1 << 20}},
    ]
}


def run(*arguments: str) -> Result:
    return invoke("pool", *arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    events: list[object] = []
    ended = threading.Event()

    def post(event: object) -> None:
        events.append(event)
        ended.set()

    store = open_store(tmp_path / "ssd", "prefill-0", Arena(LAYOUT, 4), 4, post)
    keys = tuple(BlockKey(bytes([i]) * 16) for i in range(3))
    store.store("s", keys, (BlockId(0), BlockId(1), BlockId(2)), (0, 1, 2))
    assert ended.wait(60)
    store.close()
    return store.folder


def test_verify_counts_and_fails_on_damage(folder: Path, tmp_path: Path) -> None:
    for path in (folder, folder.parent):
        result = run("verify", str(path), "--json", str(tmp_path / "v.json"))
        assert result.exit_code == 0
        assert "3 blocks" in result.output and "0 damaged" in result.output
    with (folder / "segment-000000").open("r+b") as file:
        file.seek(4096 + 5)
        file.write(b"x")
    result = run("verify", str(folder), "--json", str(tmp_path / "v.json"))
    assert result.exit_code == 1
    assert "damaged slots: 0" in result.output
    assert "1 blocks are damaged" in result.output
    figures = json.loads((tmp_path / "v.json").read_bytes())
    assert figures["bad_blocks"] == 1
    assert figures["folders"][0]["bad_slots"] == [0]


def test_clear_empties_and_says_how_much(folder: Path) -> None:
    result = run("clear", str(folder.parent))
    assert result.exit_code == 0
    assert "GiB freed" in result.output
    assert not folder.exists()
    result = run("clear", str(folder.parent))
    assert result.exit_code == 1
    assert "no instance keeps blocks in" in result.output


def test_a_folder_that_is_not_there_is_named() -> None:
    for command in ("verify", "clear"):
        result = run(command, "/nowhere/at/all")
        assert result.exit_code == 1
        assert "/nowhere/at/all" in result.output and result.output.count("\n") == 1


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = json.dumps(CLUSTER if self.path == "/cluster" else {}).encode()
            self.answer(body, 200 if self.path.endswith("/cluster") else 404)

    with serving(Handler) as place:
        yield f"http://{place}"


def test_stat_and_audit_show_every_tier(url: str) -> None:
    result = run("stat", "--url", url)
    assert result.exit_code == 0
    assert "3.00 GB read, SSD, 1.50 GB/s" in result.output
    assert "prefill-0: 1,234 blocks were damaged, SSD; its log names the files" in result.output
    rows = [line.split()[:3] for line in result.output.splitlines()[1:3]]
    assert rows == [["prefill-0", "DRAM", "10"], ["prefill-0", "SSD", "40"]]
    result = run("audit", "--url", url)
    assert result.exit_code == 0
    assert "prefill-0 SSD: 3 held + 37 available = 40 blocks" in result.output
    assert "the sums balance" in result.output


def test_an_unbalanced_pool_fails_the_audit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLUSTER["instances"][0]["ssd"], "available", 36)
    result = run("audit", "--url", url)
    assert result.exit_code == 1
    assert "prefill-0 SSD: 3 held plus 36 available blocks are not 40 in total" in result.output


def test_a_wrong_url_gets_one_line(url: str) -> None:
    for wrong in ("http://127.0.0.1:9", "nonsense", f"{url}/elsewhere"):
        result = run("stat", "--url", wrong)
        assert result.exit_code == 1
        assert wrong in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held": 4}, "4 held plus 7 available blocks are not 10 in total"),
        ({"owners": {"work:r/1": 2}}, "owners hold only 2"),
        ({"held": 0, "available": 10}, "but no block is held"),
        ({"cached": 11}, "11 blocks are cached"),
    ],
)
def test_each_imbalance_is_found(change: dict[str, Any], words: str) -> None:
    assert audit_cluster(CLUSTER) == []
    cluster = deepcopy(CLUSTER)
    cluster["instances"][0]["pool"] |= change
    (problem,) = audit_cluster(cluster)
    assert words in problem and problem.startswith("prefill-0 DRAM")


def test_blocks_held_for_nobody_are_a_leak() -> None:
    cluster = deepcopy(CLUSTER)
    cluster["instances"][0]["running"] = 0
    assert audit_cluster(cluster) == [
        "prefill-0: no request is running, but blocks are held for work:r/1"
    ]

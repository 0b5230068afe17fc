"""Tests that the files that former releases left on a machine can be read, as docs/operating.md
promises for an upgrade.

The archives hold a config file, step times and an SSD folder, each made by the code of that
release: 0.1.0's by that of commit 7437cd67. `python -m tests.unit.upgrade.record` makes the
archives of later releases.
"""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from moonpool_engine.engine.step import StepResult
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.worker import profile_store
from tests.cli_runner import invoke
from tests.unit.storage.store_harness import Bench, key_of, make_layout
from tests.unit.upgrade.record import NUM_BLOCKS, record
from tests.unit.upgrade.small_engine import small_engine

HERE = Path(__file__).parent
OPERATING = HERE.parents[2] / "docs" / "operating.md"
THIS = "this release"


@pytest.fixture(params=[*sorted(path.name for path in HERE.glob("*.tar.gz")), THIS])
def left(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder with the files of a release. The files of the present release are recorded
    now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = HERE / request.param
    if request.param == THIS:
        archive = tmp_path / "this.tar.gz"
        record(archive)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "left", filter="data")
    for folder in (tmp_path / "left" / "ssd").glob("*"):
        folder.chmod(0o700)
    return tmp_path / "left"


def upgrading() -> str:
    return OPERATING.read_text().partition("## Upgrading")[2].partition("\n## ")[0]


def test_the_config_file_is_valid_and_means_the_same(left: Path) -> None:
    assert "`moonpool config check FILE`" in upgrading()
    path = left / "config.toml"
    done = invoke("config", "check", path)
    assert done.exit_code == 0, done.output
    assert ": valid;" in done.output
    keys = schema_of(Config)
    stated = tomllib.loads(path.read_text())
    shown = invoke("config", "show", "--config", path)
    assert shown.exit_code == 0, shown.output
    in_effect = tomllib.loads(shown.output)
    for table, values in stated.items():
        for key, value in values.items():
            assert f"{table}.{key}" in keys
            assert in_effect[table][key] == value, f"{table}.{key}"


def test_blocks_on_the_ssd_are_hits_and_verify_finds_them_whole(left: Path) -> None:
    done = invoke("pool", "verify", left / "ssd")
    assert done.exit_code == 0, done.output
    assert f"{NUM_BLOCKS} blocks" in done.output and " 0 damaged" in done.output
    bench = Bench(left / "ssd")
    slots = {number: number for number in range(NUM_BLOCKS)}
    assert dict(bench.stored) == {slot: key_of(number) for slot, number in slots.items()}
    assert bench.get(slots).num_blocks == NUM_BLOCKS  # `get` compares every byte
    bench.put({NUM_BLOCKS: NUM_BLOCKS})
    bench.store.close()
    assert len(Bench(left / "ssd").stored) == NUM_BLOCKS + 1


def test_a_damaged_block_is_a_miss(left: Path) -> None:
    segment = left / "ssd" / "prefill-0" / "segment-000000"
    data = bytearray(segment.read_bytes())
    slot_bytes = len(data) // 8
    assert slot_bytes == 8192
    data[slot_bytes + 4096 + 100] ^= 1  # flips a bit of the second block
    segment.write_bytes(data)
    assert invoke("pool", "verify", left / "ssd").exit_code == 1
    assert Bench(left / "ssd").get({0: 0, 1: 1, 2: 2}).num_blocks == 1


def test_a_folder_of_other_arithmetic_is_kept_until_pool_clear(left: Path) -> None:
    assert "`moonpool pool clear FOLDER`" in upgrading()
    layout = make_layout(model="another build of the kernels")
    with pytest.raises(StoreError, match=r"another model, dtype or layout.*`moonpool pool clear"):
        Bench(left / "ssd", layout)
    assert invoke("pool", "verify", left / "ssd").exit_code == 0
    cleared = invoke("pool", "clear", left / "ssd")
    assert cleared.exit_code == 0 and "freed" in cleared.output
    assert Bench(left / "ssd", layout).stored == []


def test_step_times_are_listed_read_and_cleared(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine()
    steps: list[int] = []

    def counted(entries: object) -> StepResult:
        steps.append(1)
        # not faster than on the machine that made the archive
        return StepResult([None], seconds=1.0)

    path = profile_store.profile_path(engine, 1)
    path.parent.mkdir(parents=True)
    (left / "profile.json").rename(path)
    path.touch()  # acts as if measured today, because the archive keeps no times
    monkeypatch.setattr(engine, "step", counted)
    fitted = profile_store.refine_profile(engine, 1)
    assert len(steps) == 2, "the times of that release are compared with now, and used"
    assert 0 < fitted.prefill_s(64, 0) < 60
    assert path.name in invoke("profile", "--list").output.replace("\n", "")
    monkeypatch.setattr(profile_store, "__version__", "99.0.0")
    profile_store.refine_profile(engine, 1)
    assert len(steps) > 5, "another release measures its own code"
    assert invoke("profile", "--clear").exit_code == 0
    assert not path.exists()


def test_the_page_installs_from_locks_that_are_there() -> None:
    named = re.findall(r"-r (\S+\.lock)", upgrading().replace("`", " "))
    assert set(named) == {"requirements.lock", "requirements-cuda.lock"}
    assert all((OPERATING.parents[1] / name).is_file() for name in named)


def test_profiles_of_a_release_are_json_that_states_its_points(left: Path) -> None:
    found = json.loads((left / "profile.json").read_text())
    samples = found["samples"] if isinstance(found, dict) else found
    assert len(samples) > 5 and all(sample["seconds"] > 0 for sample in samples)

"""Records the files that this release leaves on a machine, for the tests of the next release. Run
it once per release.

    python -m tests.unit.upgrade.record

It writes `VERSION.tar.gz` beside this file: a config file with every key and its default, step
times as `profile` keeps them, and the SSD folder of an instance with five blocks.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import moonpool
from moonpool_engine.worker.profile_store import profile_path, refine_profile
from tests.cli_runner import invoke
from tests.unit.storage.store_harness import Bench
from tests.unit.upgrade.small_engine import small_engine

HERE = Path(__file__).parent
NUM_BLOCKS = 5


def record(target: Path) -> None:
    """Writes the archive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = ["config", "init", str(folder / "config.toml")]
        done = invoke(*line)
        if done.exit_code != 0:
            raise SystemExit(done.output)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        engine = small_engine()
        refine_profile(engine, 1)
        profile_path(engine, 1).rename(folder / "profile.json")
        bench = Bench(folder / "ssd")
        bench.put({number: number for number in range(NUM_BLOCKS)})
        bench.store.close()
        (bench.store.folder / "lock").unlink()
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        _pack(folder, [path for path in paths if "cache" not in path.parts], target)


def _pack(folder: Path, paths: list[Path], target: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in paths:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o600
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    target.write_bytes(gzip.compress(data.getvalue(), mtime=0))


if __name__ == "__main__":
    made = HERE / f"{moonpool.__version__}.tar.gz"
    if made.exists():
        sys.exit(f"{made} exists: a release is recorded once")
    record(made)
    print(made)

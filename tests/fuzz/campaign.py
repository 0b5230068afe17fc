"""Runs readers in separate processes, so that a crash is a finding and does not end the campaign.

All processes are forked from one process that has imported the readers, because the import takes
longer than thousands of inputs.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

from tests.fuzz.harness import Finding, LastInput, fuzz

_READERS = "tests.fuzz.readers"
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([_READERS])


def run_apart(reader: str, num_inputs: int, seed: int) -> list[Finding]:
    """Fuzzes one reader in a process. If the process dies, the finding has the last input."""
    with tempfile.TemporaryDirectory(prefix="moonpool-fuzz-") as name:
        folder = Path(name)
        child = _forks.Process(
            target=_fuzz_here, args=(reader, num_inputs, seed, folder), daemon=True
        )
        child.start()
        child.join()
        if child.exitcode != 0:
            data = b""
            if (folder / "last-input").exists():
                data = LastInput.read(folder / "last-input")
            said = (folder / "stderr").read_text(errors="replace")[-2000:]
            what = f"the process ended with status {child.exitcode}: {said}"
            return [Finding(reader, what, data)]
        found = json.loads((folder / "findings.json").read_text())
    return [Finding(reader, what, bytes.fromhex(data)) for what, data in found]


def _fuzz_here(name: str, num_inputs: int, seed: int, folder: Path) -> None:
    with (folder / "stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
    readers = {reader.name: reader for reader in importlib.import_module(_READERS).READERS}
    found = [(one.what, one.data.hex()) for one in fuzz(readers[name], num_inputs, seed, folder)]
    (folder / "findings.json").write_text(json.dumps(found))

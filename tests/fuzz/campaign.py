"""Runs readers in processes of their own, so that a crash is a finding and ends no campaign."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.harness import Finding, LastInput


def run_apart(reader: str, num_inputs: int, seed: int) -> list[Finding]:
    """Fuzzes one reader in a process. Its death is a finding with the input that it had."""
    with tempfile.TemporaryDirectory(prefix="moonpool-fuzz-") as name:
        folder = Path(name)
        line = [sys.executable, "-m", "tests.fuzz", "--here", name, "--reader", reader]
        line += ["--inputs", str(num_inputs), "--seed", str(seed)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not (folder / "findings.json").exists():
            data = b""
            if (folder / "last-input").exists():
                data = LastInput.read(folder / "last-input")
            what = f"the process ended with status {done.returncode}: {done.stderr[-2000:]}"
            return [Finding(reader, what, data)]
        found = json.loads((folder / "findings.json").read_text())
    return [Finding(reader, what, bytes.fromhex(data)) for what, data in found]


def write_findings(findings: list[Finding], folder: Path) -> None:
    """Writes the findings for the process that called `run_apart`."""
    found = [(finding.what, finding.data.hex()) for finding in findings]
    (folder / "findings.json").write_text(json.dumps(found))

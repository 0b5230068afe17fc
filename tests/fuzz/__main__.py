"""`python -m tests.fuzz --inputs N [--reader NAME] [--seed S]`: fuzzes readers of outside bytes.

The inputs are shared out evenly. Prints a line per reader, and writes the input of each finding to
a file. Ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from tests.fuzz.campaign import run_apart, write_findings
from tests.fuzz.harness import fuzz
from tests.fuzz.readers import READERS

ROUND_INPUTS = 20_000
"""Inputs of one process: memory that grows is seen, and a crash loses little."""


def main() -> int:
    readers = {reader.name: reader for reader in READERS}
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--reader", choices=readers, action="append", help="only these readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder of inputs")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here is not None:
        findings = fuzz(readers[given.reader[0]], given.inputs, given.seed, given.here)
        write_findings(findings, given.here)
        return bool(findings)
    names = given.reader or list(readers)
    each = given.inputs // len(names)
    found = [_campaign(name, each, given.seed, given.keep) for name in names]
    return any(found)


def _campaign(name: str, num_inputs: int, seed: int, keep: Path) -> bool:
    started_s, done, num_findings = time.monotonic(), 0, 0
    while done < num_inputs and num_findings < 10:
        count = min(ROUND_INPUTS, num_inputs - done)
        for finding in run_apart(name, count, seed * 1_000_003 + done):
            keep.mkdir(exist_ok=True)
            digest = hashlib.sha256(finding.data).hexdigest()[:12]
            (keep / f"{name}-{digest}").write_bytes(finding.data)
            print(f"{name}: {finding.what}\n  input: {keep}/{name}-{digest}")
            num_findings += 1
        done += count
    taken_s = time.monotonic() - started_s
    print(f"{name:<18} {done:>9} inputs  {num_findings} findings  {taken_s:.0f} s", flush=True)
    return num_findings > 0


if __name__ == "__main__":
    sys.exit(main())

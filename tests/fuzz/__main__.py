"""`python -m tests.fuzz --inputs N [--seconds S] [--json FILE]`: fuzzes readers of outside bytes.

Each reader gets the same number of inputs and of seconds, so a slow reader gets fewer inputs.
Prints a line per reader, and writes the input of each finding to a file. With `--json`, the counts
are added to those in FILE, and inputs of earlier runs are not drawn again, so several short runs
are equivalent to a long one. Ends with status 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from tests.fuzz.campaign import run_apart
from tests.fuzz.figures import Figures
from tests.fuzz.readers import READERS

ROUND_INPUTS = 20_000
"""The number of inputs of one process, so that growing memory is seen and a crash loses
little."""
FIRST_ROUND_INPUTS = 300
ROUND_S = 20.0


def main() -> int:
    readers = {reader.name: reader for reader in READERS}
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--reader", choices=readers, action="append", help="only these readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=86_400.0, help="of all readers together")
    parser.add_argument("--json", type=Path, help="file of counts, which are added to")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder of inputs")
    given = parser.parse_args()
    names = given.reader or list(readers)
    figures = Figures.read(given.json)
    each, each_s = given.inputs // len(names), given.seconds / len(names)
    found = False
    for name in names:
        found |= _campaign(name, each, given.seed, given.keep, figures, each_s)
        figures.write(given.json)
    return found


def _campaign(
    name: str, num_inputs: int, seed: int, keep: Path, figures: Figures, seconds: float
) -> bool:
    counts = figures.of(name)
    started_s, done, before = time.monotonic(), 0, counts.num_findings
    first = counts.inputs
    count = FIRST_ROUND_INPUTS
    while done < num_inputs and counts.num_findings - before < 10:
        taken_s = time.monotonic() - started_s
        if done and taken_s >= seconds:
            break
        if done:
            left_s = min(seconds - taken_s, ROUND_S)
            count = max(int(left_s * done / taken_s), FIRST_ROUND_INPUTS)
        count = min(count, ROUND_INPUTS, num_inputs - done)
        findings = run_apart(name, count, seed * 1_000_003 + first + done)
        counts.add(count, findings)
        for finding in findings:
            keep.mkdir(exist_ok=True)
            digest = hashlib.sha256(finding.data).hexdigest()[:12]
            (keep / f"{name}-{digest}").write_bytes(finding.data)
            print(f"{name}: {finding.what}\n  input: {keep}/{name}-{digest}")
        done += count
    taken_s = time.monotonic() - started_s
    counts.seconds += taken_s
    num_findings = counts.num_findings - before
    print(f"{name:<18} {done:>9} inputs  {num_findings} findings  {taken_s:.0f} s", flush=True)
    return num_findings > 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the CPU time of the simulator and of the default decision with another commit's.

    python -m benchmarks.guard [COMMIT]     # or `make bench-guard`

The default is the last release, or the commit before this one where there is none. Both run on this
machine in turns, in separate processes, and the least time of each counts, so that other work on
the machine affects both equally. Ends with status 1 if a time has grown by more than `MOST_LOSS`.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.checkout import ROOT

MOST_LOSS = 0.1
ROUNDS = 3
OWN = "this checkout"

Times = dict[str, float]
"""CPU seconds by the measured part."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard")
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each (default: 3)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    commit = arguments.commit or _last_release()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _extract(commit, Path(folder))
            old, new = in_turns(Path(folder) / "src", ROOT / "src", arguments.rounds, measure)
        except GuardError as error:
            print(f"bench-guard: {error}", file=sys.stderr)
            return 2
    lines, lost = compared(old, new, commit)
    print("\n".join(lines))
    return 1 if lost else 0


class GuardError(Exception):
    """Nothing could be compared; the message says why, in one line."""


def in_turns(
    old: Path, new: Path, rounds: int, run: Callable[[Path], Times]
) -> tuple[Times, Times]:
    """The least times of both sources. The order of both changes from round to round."""
    found: dict[Path, Times] = {old: {}, new: {}}
    for number in range(rounds):
        for sources in (old, new) if number % 2 == 0 else (new, old):
            for name, seconds in run(sources).items():
                found[sources][name] = min(found[sources].get(name, seconds), seconds)
    return found[old], found[new]


def compared(old: Times, new: Times, commit: str) -> tuple[list[str], bool]:
    """Returns the lines of a table of both, and whether a time has grown too much."""
    width = max(map(len, new))
    lines = [f"{'CPU seconds':{width}}  {commit:>14}  {OWN:>14}  {'ratio':>6}"]
    lost = False
    for name, seconds in new.items():
        before_s = old[name]
        ratio = seconds / max(before_s, 1e-9)
        too_much = ratio > 1.0 + MOST_LOSS
        lost = lost or too_much
        mark = f"  more than {MOST_LOSS:.0%} slower" if too_much else ""
        lines.append(f"{name:{width}}  {before_s:14.3f}  {seconds:14.3f}  {ratio:6.2f}{mark}")
    return lines, lost


def measure(sources: Path) -> Times:
    """Measures the package `moonpool` of this folder in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.guard_child", str(sources)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise GuardError(f"{sources} cannot be measured: {last[0]}")
    return msgspec.json.decode(done.stdout, type=Times)


def _last_release() -> str:
    try:
        return _git("describe", "--tags", "--abbrev=0").decode().strip()
    except GuardError:
        return "HEAD~1"


def _extract(commit: str, folder: Path) -> None:
    archive = io.BytesIO(_git("archive", commit, "src"))
    with tarfile.open(fileobj=archive) as files:
        files.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise GuardError(f"git {arguments[0]} failed: {done.stderr.decode().strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

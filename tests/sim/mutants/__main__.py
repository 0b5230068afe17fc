"""`python -m tests.sim.mutants [NAME] [--json FILE]`: plants bugs, and shows which check finds each
of them.

The case that found a mutant is run again without the mutant, and must pass. Ends with status 1 if a
mutant is not found.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moonpool.cli.output import origin
from tests.sim.mutants.checks import CHECKS
from tests.sim.mutants.mutant import Mutant, PatchBrokenError, failure_of, find
from tests.sim.mutants.registry import MUTANTS

MAX_CASES = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names; all unless given")
    parser.add_argument("--cases", type=int, default=MAX_CASES, help="most cases per mutant")
    parser.add_argument("--first", type=int, default=0, help="case to begin with")
    parser.add_argument("--json", type=Path, help="table to which rows are added")
    given = parser.parse_args()
    wanted = tuple(given.names)
    mutants = [m for name, m in MUTANTS.items() if not wanted or name.startswith(wanted)]
    rows = []
    for mutant in mutants:
        rows.append(_row(mutant, range(given.first, given.first + given.cases)))
        if given.json is not None:
            _add_row(given.json, rows[-1])
    missed = [row["name"] for row in rows if row["case"] is None]
    print(f"{len(rows)} mutants, {len(missed)} not found: {', '.join(missed) or 'none'}")
    return bool(missed)


def _add_row(path: Path, row: dict[str, Any]) -> None:
    """Puts the row into the table in place of its mutant's last row."""
    found = json.loads(path.read_text())["mutants"] if path.exists() else []
    rows = {one["name"]: one for one in found} | {row["name"]: row}
    ordered = [rows[name] for name in MUTANTS if name in rows]
    made = origin() | {"command": "python -m tests.sim.mutants"}
    path.write_text(json.dumps({"mutants": ordered, "origin": made}, indent=1) + "\n")


def _row(mutant: Mutant, cases: range) -> dict[str, Any]:
    row: dict[str, Any] = {"name": mutant.name, "like": mutant.like, "check": mutant.check}
    try:
        found = find(mutant, cases)
    except PatchBrokenError as error:
        print(f"{mutant.name}: THE PATCH FAILED: {error}", flush=True)
        return row | {"case": None, "what": f"the patch failed: {error}"}
    if found is None:
        print(f"{mutant.name}: NOT FOUND in {len(cases)} cases", flush=True)
        return row | {"case": None, "what": "not found"}
    without = failure_of(CHECKS[mutant.check].run, found.case)
    assert not without, f"{mutant.check} {found.case} fails without a mutant: {without}"
    print(
        f"{mutant.name}: {mutant.check} case {found.case}, {found.seconds:.1f} s: {found.what}",
        flush=True,
    )
    seconds = round(found.seconds, 2)
    return row | {"case": found.case, "seconds": seconds, "what": found.what}


if __name__ == "__main__":
    sys.exit(main())

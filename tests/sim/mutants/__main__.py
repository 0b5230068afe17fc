"""`python -m tests.sim.mutants [NAME] [--json FILE]`: plants bugs, and shows what finds each.

Each finding's case is run again without the mutant, and must pass. Ends with status 1 if a mutant
is not found.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.sim.mutants.checks import CHECKS
from tests.sim.mutants.mutant import Mutant, PatchBrokenError, failure_of, find
from tests.sim.mutants.registry import MUTANTS

MAX_CASES = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names; all unless given")
    parser.add_argument("--cases", type=int, default=MAX_CASES, help="most cases per mutant")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wanted = tuple(given.names)
    mutants = [m for name, m in MUTANTS.items() if not wanted or name.startswith(wanted)]
    rows = [_row(mutant, given.cases) for mutant in mutants]
    missed = [row["name"] for row in rows if row["case"] is None]
    print(f"{len(rows)} mutants, {len(missed)} not found: {', '.join(missed) or 'none'}")
    if given.json is not None:
        given.json.write_text(json.dumps({"mutants": rows}, indent=1) + "\n")
    return bool(missed)


def _row(mutant: Mutant, num_cases: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": mutant.name, "like": mutant.like, "check": mutant.check}
    try:
        found = find(mutant, range(num_cases))
    except PatchBrokenError as error:
        print(f"{mutant.name}: THE PATCH FAILED: {error}", flush=True)
        return row | {"case": None, "what": f"the patch failed: {error}"}
    if found is None:
        print(f"{mutant.name}: NOT FOUND in {num_cases} cases", flush=True)
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

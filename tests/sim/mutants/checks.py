"""Lists the checks that look for planted bugs: each runs numbered cases, and raises if a case
fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.mutants.byte_checks import disk_case, wire_case
from tests.sim.swarm import run_seed


@dataclass(frozen=True)
class Check:
    """`run` takes the number of a case."""

    what: str
    run: Callable[[int], object]


CHECKS = {
    "swarm": Check("seeded simulation of a cluster with faults", run_seed),
    "wire": Check("blocks between two messengers, damaged or not", wire_case),
    "disk": Check("blocks in files, damaged or not", disk_case),
}

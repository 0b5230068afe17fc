"""Defines mutants: what a mutant changes, how it is planted, and the search for a case that finds
it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tests.sim.mutants.checks import CHECKS

CASE_LIMIT_S = 60
"""A case that takes longer than this counts as hanging."""
PATCH_ERRORS = (AttributeError, ImportError, NameError, TypeError)
"""Errors that show that a patch no longer fits the product. They are not findings."""

Make = Callable[[Any], Any]


class CaseHungError(AssertionError):
    """Is raised if a case did not end."""


class PatchBrokenError(Exception):
    """Is raised if the patch itself failed, so that the mutant shows nothing."""


@dataclass(frozen=True)
class Mutant:
    """`name` says what is wrong with the code; `like` names public bugs of the same kind."""

    name: str
    owner: object
    attribute: str
    make: Make  # makes the changed attribute from the original one
    like: tuple[str, ...] = ()
    check: str = "swarm"

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = vars(self.owner)[self.attribute]
        setattr(self.owner, self.attribute, self.make(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


@dataclass(frozen=True)
class Finding:
    """The first case of a check that fails under a mutant."""

    case: int
    num_cases: int  # number of cases tried, including this one
    seconds: float
    what: str


MUTANTS: dict[str, Mutant] = {}


def plant(
    name: str, owner: object, attribute: str, *, like: str = "", check: str = "swarm"
) -> Callable[[Make], Make]:
    """Registers the decorated function, which makes the defective attribute from the original."""

    def register(make: Make) -> Make:
        assert name not in MUTANTS and check in CHECKS
        MUTANTS[name] = Mutant(name, owner, attribute, make, tuple(like.split()), check)
        return make

    return register


def find(mutant: Mutant, cases: Iterable[int]) -> Finding | None:
    """Runs cases of the mutant's check until a case fails; returns None if none does."""
    run = CHECKS[mutant.check].run
    began_s = time.perf_counter()
    with mutant.planted():
        for number, case in enumerate(cases, 1):
            what = failure_of(run, case)
            if what:
                return Finding(case, number, time.perf_counter() - began_s, what)
    return None


def failure_of(run: Callable[[int], object], case: int) -> str:
    """Returns why the case fails, in one line, or "" if it passes."""
    before = signal.signal(signal.SIGALRM, _on_hang)
    signal.alarm(CASE_LIMIT_S)
    try:
        run(case)
    except Exception as error:
        cause: BaseException = error.__cause__ or error
        if isinstance(cause, PATCH_ERRORS):
            raise PatchBrokenError(f"{type(cause).__name__}: {cause}") from error
        text = str(cause) or _failing_line(cause)
        return f"{type(cause).__name__}: {text}".splitlines()[0][:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


def _failing_line(error: BaseException) -> str:
    """Returns the function whose bare assertion failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"in {trace.tb_frame.f_code.co_qualname}"


def _on_hang(number: int, frame: FrameType | None) -> None:
    raise CaseHungError(f"no end within {CASE_LIMIT_S} s")

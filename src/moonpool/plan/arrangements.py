"""Yields all arrangements of instances up to a price, and excludes some by known failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moonpool.plan.bounds import Bounds
from moonpool.plan.candidate import Candidate, can_serve
from moonpool.plan.demand import Layout
from moonpool.plan.trial import Cause
from moonpool.types import Struct

MOST_INSTANCES = 64
CLEAR = 0.75
"""If one cause has more than this share of the misses, the cluster lacks this resource alone."""
_DECODE = (Cause.DECODE_SPEED.value, Cause.DECODE_MEMORY.value)


def decode_share(misses: Mapping[str, int]) -> float:
    """Returns the share of the misses whose cause is in decode."""
    return sum(misses.get(cause, 0) for cause in _DECODE) / max(sum(misses.values()), 1)


class Arrangement(Struct, frozen=True):
    """Numbers of instances by role, as a candidate `one` with the least cache. `load` is computed
    (`Bounds.load`), not simulated. `name` orders arrangements that are otherwise equal."""

    one: Candidate
    usd_per_h: float
    load: float
    name: str


def arrangements(
    starts: Sequence[Candidate],
    layout: Layout,
    most_instances: int,
) -> Iterator[Candidate]:
    """Yields each arrangement of the hardware of `starts`, with the settings of `starts`."""
    seen = set()
    for start in starts:
        hardware = (start.kind, start.prefill_stages, start.decode_kind)
        if hardware in seen:
            continue
        seen.add(hardware)
        alike = start.kind == start.decode_kind
        mixed_too = any(s.mixed and s.kind == start.kind for s in starts)
        for prefill, decode, mixed in _counts(most_instances):
            if mixed and (not mixed_too or layout == "disaggregated"):
                continue
            if layout == "colocated" and prefill + decode:
                continue
            if not alike and (not decode or (mixed and start.decode_kind.offloads)):
                continue
            yield msgspec.structs.replace(start, prefill=prefill, decode=decode, mixed=mixed)


def _counts(most: int) -> Iterator[tuple[int, int, int]]:
    for total in range(1, most + 1):
        for mixed in range(total + 1):
            for decode in range(total - mixed + 1):
                prefill = total - mixed - decode
                if can_serve(prefill, decode, mixed):
                    yield prefill, decode, mixed


def possible(
    candidates: Iterator[Candidate], bounds: Bounds, wanted: float
) -> Iterator[tuple[Candidate, float]]:
    """Yields the arrangements that arithmetic does not exclude, with their loads."""
    for one in candidates:
        if bounds.most_share(one) >= wanted:
            yield one, bounds.load(one)


class Failure(Struct, frozen=True):
    """An arrangement that missed the SLOs with every tried setting, and what it lacked."""

    one: Candidate
    decode_share: float  # share of the misses that decode caused

    def excludes(self, other: Candidate) -> bool:
        """Whether `other` has less of the resource that this arrangement lacked, and no more of any
        other.

        More prefill instances may be worse where decode is lacking, because they admit more.
        """
        one = self.one
        if (one.kind, one.decode_kind, one.prefill_stages) != (
            other.kind, other.decode_kind, other.prefill_stages,
        ):  # fmt: skip
            return False
        fewer = [
            getattr(other, role) <= getattr(one, role) for role in ("prefill", "decode", "mixed")
        ]
        if not all(fewer):
            return False
        prefills = other.prefill + other.mixed < one.prefill + one.mixed
        decodes = other.decode + other.mixed < one.decode + one.mixed
        if self.decode_share > CLEAR:
            return decodes
        if self.decode_share < 1 - CLEAR:
            return prefills
        return prefills and decodes

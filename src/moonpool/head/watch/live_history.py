"""An hour of history for the live page, in fixed memory: one sample each ten seconds.

The head adds each ended request, and closes a sample by the first tick of the next ten seconds. A
tenant's samples hold its own requests and no loads. Percentiles come from a `Histogram`, whose
memory does not grow with the number of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from moonpool.conductor.conductor import Conductor, PoolLoads
from moonpool.distributions import Histogram
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, payer_of

BIN_S = 10.0
NUM_BINS = 360
MAX_TENANTS = 64
"""Most tenants that have a separate history. A new tenant replaces the one that has had no request
for longest."""
ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
_COUNTS = ("answered", "effective", "not_answered", "generated_tokens")
_GAUGES = ("hit", "ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "tbt_p90_s")
_LOADS = ("prefill_load", "decode_load")
_COLUMNS = (*_COUNTS, *_GAUGES, *_LOADS)
_LEAST_S, _MOST_S = 1e-5, 1e5
_NONE = float("nan")


class LiveHistory:
    """The samples of all requests, and those of each tenant."""

    def __init__(self, conductors: Sequence[Conductor]) -> None:
        """`conductors`: one for each model; the list may grow."""
        self._all = _Samples(partial(_loads, conductors))
        # samples by tenant, with the least recently active tenant first
        self._tenants: OrderedDict[str, _Samples] = OrderedDict()

    def request_ended(self, record: RequestRecord, now: float) -> None:
        self._all.at(now).add(record)
        tenant = payer_of(record.tenant)
        if not tenant:
            return
        own = self._tenants.setdefault(tenant, _Samples())
        self._tenants.move_to_end(tenant)
        own.at(now).add(record)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def tick(self, now: float) -> None:
        """Closes the sample if its time has passed, with the loads of this instant."""
        self._all.at(now)

    def describe(self, now: float, tenant: str | None) -> dict[str, Any]:
        """Returns lists of `NUM_BINS` numbers by name, the oldest first; None means unknown."""
        if tenant is None:
            columns = self._all.columns(now)
        else:
            columns = self._tenants.get(tenant, _Samples()).columns(now)
            for name in _LOADS:
                del columns[name]
        return {"bin_s": BIN_S, "columns": columns}


def most_loaded(conductors: Sequence[Conductor], now: float) -> PoolLoads:
    """Returns the loads of each pool at the model where they are highest; 0 without instances."""
    each = [conductor.loads(now) for conductor in conductors if conductor.instances]
    return PoolLoads(*map(max, zip(*each, strict=True))) if each else PoolLoads(0.0, 0.0, 0.0)


def _loads(conductors: Sequence[Conductor], now: float) -> tuple[float, float]:
    if not any(conductor.instances for conductor in conductors):
        return _NONE, _NONE
    loads = most_loaded(conductors, now)
    return loads.prefill, loads.decode


def _no_loads(now: float) -> tuple[float, float]:
    return _NONE, _NONE


class _Samples:
    """The closed samples of one viewer in a ring, and the open one."""

    def __init__(self, loads: Callable[[float], tuple[float, float]] = _no_loads) -> None:
        self._loads = loads
        self._ring = np.full((NUM_BINS, len(_COLUMNS)), _NONE, dtype=np.float32)
        self._open: _Sample | None = None
        self._number = 0  # number of the open sample: its start divided by `BIN_S`

    def at(self, now: float) -> _Sample:
        """Returns the open sample."""
        number = int(now // BIN_S)
        if self._open is None:
            self._open, self._number = _Sample(), number
        elif number > self._number:
            self._ring[self._number % NUM_BINS] = self._open.values(self._loads(now))
            empty = _Sample().values(_no_loads(now))
            for missed in range(max(self._number + 1, number - NUM_BINS), number):
                self._ring[missed % NUM_BINS] = empty
            self._open, self._number = _Sample(), number
        return self._open

    def columns(self, now: float) -> dict[str, list[float | None]]:
        """Returns the closed samples, followed by the open one."""
        last = self.at(now).values(self._loads(now))
        oldest_first = np.roll(self._ring, -(self._number + 1) % NUM_BINS, axis=0)
        rows = [*oldest_first[:-1].tolist(), last]
        return {
            name: [_rounded(row[column]) for row in rows] for column, name in enumerate(_COLUMNS)
        }


@dataclass(slots=True)
class _Sample:
    answered: int = 0
    effective: int = 0
    not_answered: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    tbt_s: Histogram = field(default_factory=Histogram)

    def add(self, record: RequestRecord) -> None:
        self.generated_tokens += record.num_generated_tokens
        if record.outcome not in ANSWERED:
            self.not_answered += 1
            return
        self.answered += 1
        self.effective += record.effective
        self.prompt_tokens += record.num_prompt_tokens
        self.cached_tokens += record.cached_tokens
        if record.ttft_s is not None:
            self.ttft_s.add(_bounded(record.ttft_s))
        if record.tbt_top10_mean_s is not None:
            self.tbt_s.add(_bounded(record.tbt_top10_mean_s))

    def values(self, loads: tuple[float, float]) -> list[float]:
        """Returns one number per column."""
        hit = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else _NONE
        return [
            *(float(getattr(self, name)) for name in _COUNTS),
            hit,
            *(_quantile(self.ttft_s, share) for share in (0.5, 0.9)),
            *(_quantile(self.tbt_s, share) for share in (0.5, 0.9)),
            *loads,
        ]


def _bounded(seconds: float) -> float:
    return min(max(seconds, _LEAST_S), _MOST_S)


def _quantile(values: Histogram, share: float) -> float:
    return values.quantile(share) if values.count else _NONE


def _rounded(value: float) -> float | None:
    if not isfinite(value):
        return None
    return float(f"{value:.3g}") if abs(value) < 1000 else float(round(value))

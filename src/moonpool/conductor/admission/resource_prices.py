"""Prices of a second of prefill and of a second of decode, in effective requests.

Under overload some requests must be rejected, and an admitted request takes the place of others.
Prices follow from the recent requests: those with the most worth per second that they need are
served first, until the capacity is used up. The worth per second of the last request served is the
price. A request that needs more than it is worth at this price would cost more effective requests
than it adds.
Without overload the prices are 0, and no request is rejected for what it needs.

Prefill has a queue, and a decode waits for room behind its prefill. Either may wait for
`QUEUE_SHARE` of the TTFT SLO: that much work must be waiting, so that no instance idles when
arrivals pause. A shorter queue permits more work than the capacity, a longer queue less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW_S = 120.0
"""Arrivals of the last this many seconds are the demand."""
MAX_ARRIVALS = 512
MIN_ARRIVALS = 16
"""With fewer arrivals in the window, all prices are 0."""
UPDATE_EVERY_S = 0.25

QUEUE_SHARE = 0.8
"""The queue of either resource may grow to this part of the TTFT SLO."""
GAIN = 4.0
"""The queue should reach `QUEUE_SHARE` within the time of the TTFT SLO divided by `GAIN`. Early
rejection loses requests that the queue could hold until the overload ends; late rejection lets the
queue fill with requests of little worth."""
MOST_HELP = 0.5
"""Most work on prompts by decode instances that counts, as a multiple of the work by prefill
instances."""
BURST_SHARE = 0.2
"""A burst that ends within this part of the TTFT SLO is taken by the queue."""


ROUNDING = 1.0 + 1e-9
"""Tolerance for rounding: sums of the same needs in two orders differ by less."""
LEAST_NEED = 1e-9
"""Least need that counts, so that the worth per unit of need stays finite."""


class RequestNeed(NamedTuple):
    """What one request would use of prefill and decode."""

    at_s: float
    worth: float  # the request's chance to meet both SLOs if no prefill waited
    prefill_s: float
    decode_s: float  # what the request adds to each step, times its duration over the mean duration
    alone_s: float = 0.0  # time of the whole prefill, even if later requests share its blocks


class ClusterCapacity(NamedTuple):
    """The capacity of the cluster, and how much of it is used now."""

    num_prefills: int
    queue_s: float  # time until the prefill of a request that is placed now can begin
    wait_s: float  # time until the decode of a request that is placed now can begin
    slo_ttft_s: float
    decode_load_s: float  # step time that all decodes together may add, summed over the instances
    decode_used_s: float  # step time that the present decodes add
    lifetime_s: float  # mean duration of a decode


Floats = npt.NDArray[np.float64]


class RecentArrivals:
    """The last `MAX_ARRIVALS` rows of numbers, as arrays by column. Each row is written once, so
    that no decision has to build an array."""

    def __init__(self, num_columns: int) -> None:
        self._rows = np.zeros((num_columns, 2 * MAX_ARRIVALS))
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def add(self, *row: float) -> None:
        """Appends a row, and drops the oldest one if there are too many."""
        if self._end == self._rows.shape[1]:
            # callers may keep the columns that they were given, so a new array is made
            kept = np.zeros(self._rows.shape)
            kept[:, : len(self)] = self.columns
            self._rows, self._begin, self._end = kept, 0, len(self)
        self._rows[:, self._end] = row
        self._end += 1
        self._begin = max(self._begin, self._end - MAX_ARRIVALS)

    def drop_before(self, at_s: float) -> None:
        """Drops the oldest rows with a smaller number in their first column."""
        while self._begin < self._end and self._rows.item(0, self._begin) < at_s:
            self._begin += 1

    @property
    def columns(self) -> Floats:
        """The rows, the oldest first: [num_columns, len(self)]. The returned array does not change
        while rows are added."""
        return self._rows[:, self._begin : self._end]


class ResourcePrices:
    """Learns from every arrival, admitted or not."""

    def __init__(self) -> None:
        self._needs = RecentArrivals(len(RequestNeed._fields))
        # Time of the placement, seconds of prefill on prefill instances and on decode instances.
        self._placed = RecentArrivals(3)
        # prices in effective requests per second of prefill, and per `RequestNeed.decode_s`
        self._prefill = self._decode = 0.0
        self._updated_s = float("-inf")
        # Parts of the recent arrivals that `delay` needs.
        self._worth = self._alone_s = np.zeros(0)
        self._all_alone_s = 0.0
        self._elapsed_s = 1.0

    def note_arrival(self, need: RequestNeed) -> None:
        self._needs.add(*need)

    def note_placed(self, prefill_s: float, on_decode: bool, now: float) -> None:
        """Notes that a prompt was placed, on a decode instance or on a prefill instance.
        `prefill_s`: the seconds that a prefill instance takes for the prompt."""
        self._placed.add(now, *((0.0, prefill_s) if on_decode else (prefill_s, 0.0)))

    def _help(self, now: float) -> float:
        """The work on prompts that decode instances take, relative to that of the prefill
        instances."""
        if not len(self._placed):
            return 0.0
        at_s, own_s, taken_s = self._placed.columns
        # Sums in the order of time are the same on every machine.
        counts = at_s >= now - WINDOW_S
        own = np.cumsum(np.where(counts, own_s, 0.0)).item(-1)
        taken = np.cumsum(np.where(counts, taken_s, 0.0)).item(-1)
        return min(taken / own, MOST_HELP) if own else 0.0

    def cost(self, need: RequestNeed, capacity: ClusterCapacity, now: float) -> tuple[float, float]:
        """How many effective requests the prefill and the decode of a request would displace."""
        if now - self._updated_s >= UPDATE_EVERY_S or now < self._updated_s:
            self._update(capacity, now)
            self._updated_s = now
        return self._prefill * need.prefill_s, self._decode * need.decode_s

    def delay(
        self, begin_s: float, prefill_s: float, num_prefills: int, slo_ttft_s: float
    ) -> float:
        """How many effective requests come too late because an instance computes a prompt from
        `begin_s` to `begin_s + prefill_s` from now. Call `cost` before `delay`.

        Arrivals are assumed to continue at their recent rate. An arrival that needs `alone_s` is
        late if this instance is then busy for more than the rest of its TTFT SLO. Such an arrival
        waits for this instance if all other instances are busy, and each of them is equally likely
        to be free first. The number of late requests is limited to what the instances could
        compute.
        """
        if not len(self._worth) or not num_prefills:
            return 0.0
        busy = self._all_alone_s / (num_prefills * self._elapsed_s)
        all_busy = min(busy, 1.0) ** (num_prefills - 1)
        if not all_busy:
            return 0.0
        rest_s = np.maximum(slo_ttft_s - self._alone_s, 0.0)
        late_s = np.maximum(begin_s + prefill_s - rest_s, 0.0) - np.maximum(begin_s - rest_s, 0.0)
        late = float((self._worth * late_s).sum()) / self._elapsed_s / max(busy, 1.0)
        return late * all_busy / num_prefills

    @property
    def prices(self) -> tuple[float, float]:
        """Returns effective requests per second of prefill, and per `RequestNeed.decode_s`."""
        return self._prefill, self._decode

    def _update(self, capacity: ClusterCapacity, now: float) -> None:
        slo_s = min(max(capacity.slo_ttft_s, 1e-3), WINDOW_S)
        self._needs.drop_before(now - WINDOW_S)
        if len(self._needs) < MIN_ARRIVALS:
            self._prefill = self._decode = 0.0
            self._worth = self._alone_s = np.zeros(0)
            return
        at_s, worth, prefill_s, decode_s, alone_s = self._needs.columns
        elapsed_s = max(now - at_s.item(0), BURST_SHARE * slo_s)
        self._worth, self._alone_s, self._elapsed_s = worth, alone_s, elapsed_s
        self._all_alone_s = float(alone_s.sum())
        pace = _pace(capacity.queue_s / slo_s)
        self._prefill = 0.0
        # Mostly the prefill instances alone suffice, and nothing else has to be computed.
        if not _suffices(capacity.num_prefills * elapsed_s * pace, prefill_s):
            supply_s = capacity.num_prefills * (1.0 + self._help(now)) * elapsed_s * pace
            self._prefill = _price(worth - self._decode * decode_s, prefill_s, supply_s)
        pace = _pace(capacity.wait_s / slo_s)
        turnover = elapsed_s / max(capacity.lifetime_s, 1e-3)
        unused_s = max(capacity.decode_load_s - capacity.decode_used_s, 0.0)
        supply_s = capacity.decode_load_s * turnover * pace + unused_s
        self._decode = 0.0
        if not _suffices(supply_s, decode_s):
            self._decode = _price(worth - self._prefill * prefill_s, decode_s, supply_s)


def _pace(waiting: float) -> float:
    """Work to admit per unit of capacity, with a queue of this share of the TTFT SLO."""
    return max(1.0 + GAIN * (QUEUE_SHARE - waiting), 0.0)


def _suffices(supply: float, need: Floats) -> bool:
    """Whether the supply is certainly enough for all requests, so that `_price` would return 0 for
    any worth."""
    most = float(need.sum()) + LEAST_NEED * len(need)
    return most * ROUNDING * ROUNDING <= supply


def _price(worth: Floats, need: Floats, supply: float) -> float:
    """Returns the worth of the last unit when requests are served in falling order of worth per
    unit of need until the supply is used up. Returns 0 if the supply suffices for all requests with
    a positive worth."""
    wanted = worth > 0.0
    worth, need = worth[wanted], np.maximum(need[wanted], LEAST_NEED)
    if not len(need) or float(need.sum()) * ROUNDING <= supply:
        return 0.0
    density = worth / need
    order = np.argsort(-density, kind="stable")
    used = np.cumsum(need[order])
    if used.item(-1) <= supply:
        return 0.0
    return density.item(order.item(int(np.searchsorted(used, supply))))

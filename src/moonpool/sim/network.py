"""Computes, for transfers that share links, the rate of each flow and when its last byte arrives.

A link is anything with a bandwidth that transfers share: one direction of a NIC, PCIe, an SSD.
Rates are max-min fair: a flow can only become faster if an equally fast or slower flow slows down.

Life of a flow: STARTING (latency) -> MOVING -> ENDED | CANCELLED. A flow occupies its links only
while MOVING.

Flows are updated lazily: between two changes of its rate, a flow costs no computation. All changes
of one instant are applied together at its end, since rates matter only when time advances.

A certificate limits how many rates are recomputed. Rates are max-min fair exactly if no link is
overloaded and each flow runs at its own limit or has a *bottleneck*: a full link on which no flow
is faster. So only the flows nearest to a change are recomputed first, with all others held fixed.
Held flows that then lack a bottleneck, or are faster than a new bottleneck allows, join the
recomputed set, until no more flow joins. The set is usually a small part of the connected component
of flows, and at most all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from heapq import heapify, heappop, heapreplace
from math import inf

from moonpool.sim.clock import Clock, Priority, Timer

ROUNDING = 1e-12
"""A link is full within this relative distance of its bandwidth, because sums are rounded."""


class FlowState(Enum):
    """The states of a flow, which the module docstring explains."""

    STARTING = "starting"
    MOVING = "moving"
    ENDED = "ended"
    CANCELLED = "cancelled"


OVER = (FlowState.ENDED, FlowState.CANCELLED)


class Link:
    """One shared bandwidth, created by `Network.add_link`."""

    __slots__ = (
        "_banked_busy_s",
        "_banked_bytes",
        "_busy_since_s",
        "_flows",
        "_level",
        "_network",
        "_num_open",
        "_spare",
        "_top",
        "_used",
        "bytes_per_s",
        "name",
        "num_bound",
        "peak_flows",
    )

    def __init__(self, network: Network, name: str, bytes_per_s: float) -> None:
        self._network = network
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.peak_flows = 0
        self._flows: dict[Flow, None] = {}  # the flows under way, in the order in which they joined
        self.num_bound = 0  # number of flows whose bottleneck is this link
        self._used = 0.0  # sum of the flows' rates
        self._banked_bytes: float = 0  # an exact int until a flow is cancelled
        self._banked_busy_s = 0.0
        self._busy_since_s = 0.0
        # `_fill` keeps here: bandwidth left, flows to share it, highest rate given, final level.
        self._spare = 0.0
        self._num_open = 0
        self._top = 0.0
        self._level = inf

    def __repr__(self) -> str:
        return f"Link({self.name!r}, {self.bytes_per_s:g} B/s, {len(self._flows)} flows)"

    @property
    def num_flows(self) -> int:
        """The number of moving flows."""
        return len(self._flows)

    @property
    def bytes_carried(self) -> float:
        """The bytes carried until now, including bytes of unfinished flows."""
        now = self._network.clock.now
        return self._banked_bytes + sum(flow._moved_bytes(now) for flow in self._flows)

    @property
    def busy_s(self) -> float:
        """The time until now with at least one flow on this link, moving or stalled."""
        since_s = self._network.clock.now - self._busy_since_s if self._flows else 0.0
        return self._banked_busy_s + since_s


class Flow:
    """A transfer over a path of links, created by `Network.start`."""

    __slots__ = (
        "_bottleneck",
        "_left_bytes",
        "_network",
        "_next_bottleneck",
        "_next_rate",
        "_on_end",
        "_rate",
        "_settled_s",
        "_timer",
        "limit_bytes_per_s",
        "num_bytes",
        "path",
        "started_s",
        "state",
    )

    def __init__(
        self,
        network: Network,
        path: tuple[Link, ...],
        num_bytes: int,
        on_end: Callable[[Flow], object],
        limit_bytes_per_s: float,
    ) -> None:
        self._network = network
        self._on_end = on_end
        self.path = path
        self.num_bytes = num_bytes
        self.limit_bytes_per_s = limit_bytes_per_s
        self.state = FlowState.STARTING
        self.started_s = network.clock.now
        self._left_bytes: float = num_bytes
        self._settled_s = self.started_s  # the time at which `_left_bytes` was computed
        self._rate = 0.0
        self._bottleneck: Link | None = None  # None if limit_bytes_per_s is the limit
        self._timer: Timer | None = None
        self._next_rate = 0.0  # used by `_fill`; negative if not yet known
        self._next_bottleneck: Link | None = None

    def __repr__(self) -> str:
        names = "->".join(link.name for link in self.path)
        return f"Flow({names}, {self.num_bytes} bytes, {self.state.value})"

    @property
    def rate_bytes_per_s(self) -> float:
        """The current rate, with all changes of this instant applied."""
        self._network._rerate_pending()
        return self._rate

    @property
    def moved_bytes(self) -> float:
        """Bytes moved until now."""
        return self._moved_bytes(self._network.clock.now)

    def cancel(self) -> None:
        """Stops the flow; `on_end` is not called. Has no effect on a flow that is over."""
        if self.state not in OVER:
            self._network._cancel(self)

    def _moved_bytes(self, now: float) -> float:
        left = self._left_bytes
        if self._rate > 0.0:
            left -= self._rate * (now - self._settled_s)
        return self.num_bytes - max(left, 0)

    def _settle(self, now: float) -> None:
        if self._rate > 0.0:
            left = self._left_bytes - self._rate * (now - self._settled_s)
            self._left_bytes = left if left > 0.0 else 0.0
        self._settled_s = now


class Network:
    """All links and flows of a simulation."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.links: dict[str, Link] = {}
        self.num_rerated = 0  # number of computed rates, the cost of fair sharing
        self._new_flows: dict[Flow, None] = {}  # flows to rate at the end of this instant
        self._changed_links: dict[Link, None] = {}  # links whose bound flows are to be rated
        self._rerate_timer: Timer | None = None

    def add_link(self, name: str, bytes_per_s: float) -> Link:
        """Adds a link. Raises ValueError for a name in use or a bandwidth that is not finite."""
        if name in self.links:
            raise ValueError(f"there is a link {name!r} already: use another name")
        _check_bandwidth(name, bytes_per_s)
        link = self.links[name] = Link(self, name, bytes_per_s)
        return link

    def start(
        self,
        path: tuple[Link, ...],
        num_bytes: int,
        on_end: Callable[[Flow], object],
        limit_bytes_per_s: float = inf,
        latency_s: float = 0.0,
    ) -> Flow:
        """Starts a transfer: its bytes move after `latency_s`, then `on_end(flow)` is called.

        `on_end` is always called from the clock, never from within a call to the network. Raises
        ValueError for an empty path, a link twice on it, and negative or infinite sizes.
        """
        if not path or len(dict.fromkeys(path)) != len(path):
            names = [link.name for link in path]
            raise ValueError(f"a path must name at least one link, and each link once, not {names}")
        _check_bytes(num_bytes)
        _check_limit(limit_bytes_per_s)
        flow = Flow(self, path, num_bytes, on_end, limit_bytes_per_s)
        if latency_s > 0.0:
            flow._timer = self.clock.after(latency_s, Priority.TRANSFER_END, self._open, flow)
        elif latency_s == 0.0:
            self._open(flow)
        else:
            raise ValueError(f"a flow cannot start after {latency_s} s: use 0 or more")
        return flow

    def _open(self, flow: Flow) -> None:
        """Starts to move the bytes of the flow, after its latency."""
        flow._timer = None
        if flow._left_bytes > 0:
            self._join(flow)
        else:
            flow._timer = self.clock.at(self.clock.now, Priority.TRANSFER_END, self._end, flow)

    def _join(self, flow: Flow) -> None:
        """Adds the flow to its links."""
        now = self.clock.now
        flow.state = FlowState.MOVING
        flow._settled_s = now
        for link in flow.path:
            flows = link._flows
            if not flows:
                link._busy_since_s = now
            flows[flow] = None
            if len(flows) > link.peak_flows:
                link.peak_flows = len(flows)
        if not self._rate_alone(flow):
            self._rerate_soon((flow,), flow.path)

    def _leave(self, flow: Flow) -> None:
        """Removes an updated flow from its links, which count the bytes it moved."""
        now = self.clock.now
        moved = flow.num_bytes - flow._left_bytes
        rate = flow._rate
        changed = []
        for link in flow.path:
            del link._flows[flow]
            link._banked_bytes += moved
            if flow._bottleneck is link:
                link.num_bound -= 1
            if not link._flows:
                link._used = 0.0
                link._banked_busy_s += now - link._busy_since_s
                continue
            link._used -= rate
            if link.num_bound and rate > 0.0:
                changed.append(link)
        flow._rate = 0.0
        flow._bottleneck = None
        self._new_flows.pop(flow, None)
        if changed:
            self._rerate_soon((), changed)

    def _arrived(self, flow: Flow) -> None:
        """Ends the flow, because its last byte has arrived."""
        flow._left_bytes = 0  # exactly 0, because an update would leave a rounding error
        self._leave(flow)
        self._end(flow)

    def _end(self, flow: Flow) -> None:
        flow._timer = None
        flow.state = FlowState.ENDED
        flow._on_end(flow)

    def _cancel(self, flow: Flow) -> None:
        self._set_timer(flow, None)
        if flow.state is FlowState.MOVING:
            flow._settle(self.clock.now)
            self._leave(flow)
        flow.state = FlowState.CANCELLED

    def _set_timer(self, flow: Flow, time_s: float | None) -> None:
        if flow._timer is not None:
            flow._timer.cancel()
            flow._timer = None
        if time_s is not None:
            flow._timer = self.clock.at(time_s, Priority.TRANSFER_END, self._arrived, flow)

    def _set_end(self, flow: Flow) -> None:
        """Schedules the end of an updated flow at its current rate."""
        rate = flow._rate
        self._set_timer(flow, self.clock.now + flow._left_bytes / rate if rate > 0.0 else None)

    # ---- rates ----------------------------------------------------------------------------

    def _rate_alone(self, flow: Flow) -> bool:
        """Rates a flow at its limit if that affects no other flow. Returns whether it did."""
        more = flow.limit_bytes_per_s - flow._rate
        for link in flow.path:
            if link.num_bound or link._used + more > link.bytes_per_s:
                return False
        for link in flow.path:
            link._used += more
        self.num_rerated += 1
        flow._settle(self.clock.now)
        flow._rate = flow.limit_bytes_per_s
        self._set_end(flow)
        return True

    def _rerate_soon(self, flows: Iterable[Flow], links: Iterable[Link]) -> None:
        for flow in flows:
            self._new_flows[flow] = None
        for link in links:
            self._changed_links[link] = None
        if self._rerate_timer is None:
            self._rerate_timer = self.clock.at(self.clock.now, Priority.RERATE, self._rerate)

    def _rerate_pending(self) -> None:
        if self._rerate_timer is not None:
            self._rerate_timer.cancel()
            self._rerate()

    def _rerate(self) -> None:
        self._rerate_timer = None
        region, self._new_flows = self._new_flows, {}
        for link in self._changed_links:
            region.update((flow, None) for flow in link._flows if flow._bottleneck is link)
        self._changed_links = {}
        while True:
            links = _fill(region)
            joining = _uncertified(region, links)
            if not joining:
                break
            region.update(joining)
        self._apply(region)
        for link in links:
            link._used = link.bytes_per_s - link._spare

    def _apply(self, region: dict[Flow, None]) -> None:
        now = self.clock.now
        self.num_rerated += len(region)
        for flow in region:
            bottleneck = flow._next_bottleneck
            if bottleneck is not flow._bottleneck:
                if flow._bottleneck is not None:
                    flow._bottleneck.num_bound -= 1
                if bottleneck is not None:
                    bottleneck.num_bound += 1
                flow._bottleneck = bottleneck
            if flow._next_rate != flow._rate:
                flow._settle(now)
                flow._rate = flow._next_rate
                self._set_end(flow)


def _fill(region: dict[Flow, None]) -> dict[Link, None]:
    """Fills progressively: all rates of the region rise together, with all other rates held.

    A flow stops rising at its own limit, or when a link of its path is full. Writes `_next_rate`
    and `_next_bottleneck`; returns the links of the region.
    """
    links: dict[Link, None] = {}
    limited = []
    for flow in region:
        flow._next_rate = -1.0
        if flow.limit_bytes_per_s < inf:
            limited.append(flow)
        for link in flow.path:
            if link in links:
                link._num_open += 1
            else:
                links[link] = None
                link._num_open = 1
    heap = []
    for order, link in enumerate(links):
        held = 0.0
        if len(link._flows) > link._num_open:
            for flow in link._flows:
                if flow._next_rate >= 0.0:
                    held += flow._rate
        link._spare = spare = link.bytes_per_s - held
        link._top = 0.0
        link._level = inf
        heap.append((spare / link._num_open if spare > 0.0 else 0.0, order, link))
    heapify(heap)
    limited.sort(key=_limit_of, reverse=True)  # the lowest limit comes last in the list
    while heap:
        level, order, link = heap[0]
        num_open = link._num_open
        if num_open == 0:
            heappop(heap)
            continue
        spare = link._spare
        level_now = spare / num_open if spare > 0.0 else 0.0
        # this level was computed before other flows of the link stopped rising
        if level_now > level:
            heapreplace(heap, (level_now, order, link))
            continue
        if limited and limited[-1].limit_bytes_per_s <= level_now:
            flow = limited.pop()
            if flow._next_rate < 0.0:
                _stop_rising(flow, flow.limit_bytes_per_s, None)
            continue
        link._level = level_now
        for flow in link._flows:
            if flow._next_rate < 0.0:
                _stop_rising(flow, level_now, link)
    return links


def _limit_of(flow: Flow) -> float:
    return flow.limit_bytes_per_s


def _stop_rising(flow: Flow, rate: float, bottleneck: Link | None) -> None:
    flow._next_rate = rate
    flow._next_bottleneck = bottleneck
    for link in flow.path:
        link._spare -= rate
        link._num_open -= 1
        link._top = rate  # the highest rate so far, because rates come in rising order


def _uncertified(region: dict[Flow, None], links: dict[Link, None]) -> dict[Flow, None]:
    """Returns the held flows whose rates are no longer max-min fair with the region's new rates."""
    joining: dict[Flow, None] = {}
    for link in links:
        full = link._spare <= ROUNDING * link.bytes_per_s
        top = link._top * (1.0 - ROUNDING)
        level = link._level * (1.0 + ROUNDING)
        for flow in link._flows:
            if flow in region:
                continue
            lost = flow._bottleneck is link and (not full or flow._rate < top)
            if lost or flow._rate > level:
                joining[flow] = None
    return joining


def _check_bandwidth(name: str, bytes_per_s: float) -> None:
    if not 0.0 <= bytes_per_s < inf:
        raise ValueError(
            f"link {name!r} cannot have {bytes_per_s} B/s: use a finite bandwidth of 0 or more"
        )


def _check_limit(bytes_per_s: float) -> None:
    if not bytes_per_s >= 0.0:
        raise ValueError(f"a flow cannot be limited to {bytes_per_s} B/s: use 0 or more")


def _check_bytes(num_bytes: int) -> None:
    if not 0 <= num_bytes < inf:
        raise ValueError(f"cannot send {num_bytes} bytes: use a whole number, 0 or more")

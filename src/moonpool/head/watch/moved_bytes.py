"""Bytes that each instance has moved, from the counters of its load reports, and their rates.

Rates compare the newest report with one up to `WINDOW_S` older. Reports are remembered only while
an operator watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from moonpool.conductor.state import InstanceState

WINDOW_S = 10.0
_MAX_REMEMBERED = 64
FLOWS = ("handed_over", "fetched", "copied", "sent", "ssd_loaded", "ssd_stored")
_Bytes = dict[str, float]


class MovedBytes:
    """Remembers the totals of the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._before: deque[tuple[float, dict[tuple[str, int], _Bytes]]] = deque(
            maxlen=_MAX_REMEMBERED
        )

    def describe(self, states: Iterable[InstanceState], now: float) -> list[dict[str, Any]]:
        """Returns totals in bytes and rates in bytes/s, one entry per instance that has reported.

        A rate is None until a report is at least a second old.
        """
        totals = {
            (str(state.info.instance_id), state.info.incarnation): moved_bytes(
                state.load.counters, state.info.layout.block_bytes
            )
            for state in states
            if state.load is not None
        }
        while self._before and self._before[0][0] < now - WINDOW_S:
            self._before.popleft()
        since_s, earlier = self._before[0] if self._before else (now, {})
        self._before.append((now, totals))
        passed_s = now - since_s
        return [
            {
                "instance_id": key[0],
                "bytes": moved,
                "bytes_per_s": _rates(moved, earlier.get(key), passed_s),
            }
            for key, moved in totals.items()
        ]


def moved_bytes(counters: Mapping[str, float], block_bytes: int) -> _Bytes:
    """Returns the bytes of each of `FLOWS` since the process started.

    `handed_over`: received from prefill instances. `fetched`: for a request. `copied`: taken over
    from a leaving instance, or replicated. `sent`: handed over to decode instances.
    """
    fetched = counters.get("fetched_bytes", 0.0)  # of requests and of copies
    copied = min(counters.get("taken_over_blocks", 0.0) * block_bytes, fetched)
    return {
        "handed_over": counters.get("received_bytes", 0.0),
        "fetched": fetched - copied,
        "copied": copied,
        "sent": counters.get("sent_bytes", 0.0),
        "ssd_loaded": counters.get("loaded_bytes", 0.0),
        "ssd_stored": counters.get("stored_bytes", 0.0),
    }


def _rates(moved: _Bytes, earlier: _Bytes | None, passed_s: float) -> _Bytes | None:
    if earlier is None or passed_s < 1.0:
        return None
    return {name: max(moved[name] - earlier[name], 0.0) / passed_s for name in FLOWS}

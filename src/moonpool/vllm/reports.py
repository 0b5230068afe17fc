"""How the reports of an instance go to the head: few at a time would wake both processes often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moonpool.protocol.messages import BlocksChanged, Report

BLOCKS_S = 0.05
"""How long changes of the blocks wait for another report to go with."""


class InstanceReports:
    """Sends reports in their order. Changes of the blocks wait for the next other report, because
    a server tells of them beside each token."""

    def __init__(self, send: Callable[[Sequence[Report]], None]) -> None:
        self._send = send
        self._waiting: list[Report] = []
        self._timer: asyncio.TimerHandle | None = None

    def send(self, reports: Sequence[Report]) -> None:
        self._waiting += reports
        if not all(isinstance(report, BlocksChanged) for report in reports):
            self._flush()
        elif reports and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BLOCKS_S, self._flush)

    def reset(self) -> None:
        """The head is gone."""
        self._waiting = []
        self._stop_timer()

    def _flush(self) -> None:
        self._stop_timer()
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

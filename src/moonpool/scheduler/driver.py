"""Connects what an instance decides to the parts that perform it.

Live worker, simulator, tests and benchmarks differ in the parts that compute and move blocks. Each
names them in one table, action by action; handing events in and actions out is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moonpool.scheduler.actions import WorkerAction, WorkerEvent
from moonpool.scheduler.instance import Instance

Performers = Mapping[type[WorkerAction], Callable[[Any], object]]
"""The performer of each type of action, called with the action."""


class InstanceDriver:
    """Drives one instance: gives it events, and has the actions that follow performed."""

    def __init__(
        self, instance: Instance, now_s: Callable[[], float], performers: Performers
    ) -> None:
        """`performers` may leave out actions that the instance never takes: one without SSD stores
        nothing. A part that ends its work posts the outcome, but never from within its call."""
        self.instance = instance
        self._now_s = now_s
        self._performers = performers

    def post(self, event: WorkerEvent) -> None:
        """Handles one event and performs what follows. Raises KeyError if an action has no
        performer."""
        self.perform(self.instance.handle(event, self._now_s()))

    def perform(self, actions: Iterable[WorkerAction]) -> None:
        """Performs actions in their order. Raises KeyError if one has no performer."""
        for action in actions:
            self._performers[type(action)](action)

"""What an instance has to say: actions in the order to perform them, and its counters."""

from __future__ import annotations

from moonpool.workers.actions import Tell, WorkerAction
from moonpool.workers.messages import Report


class Outbox:
    """Filled while an event is handled, emptied by the driver."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self._actions: list[WorkerAction] = []

    def do(self, action: WorkerAction) -> None:
        self._actions.append(action)

    def tell(self, report: Report) -> None:
        self._actions.append(Tell(report))

    def count(self, name: str, amount: float = 1) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0.0) + amount

    def take(self) -> list[WorkerAction]:
        actions, self._actions = self._actions, []
        return actions

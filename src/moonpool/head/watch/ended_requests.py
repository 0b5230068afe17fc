"""The ended requests: each part that counts or reports them is told once, when an outcome is
final."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from moonpool.conductor.actions import RequestEnded
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId

KEPT_RECORDS = 4096


class RequestObserver(Protocol):
    def request_ended(self, record: RequestRecord, now: float) -> None: ...


class EndedRequests:
    """The last ended requests, the newest last, and the observers of all of them."""

    def __init__(self, observers: tuple[RequestObserver, ...], now: Callable[[], float]) -> None:
        self._observers = observers
        self._now = now
        self._kept: OrderedDict[str, RequestEnded] = OrderedDict()
        self._unsettled: dict[RequestId, tuple[RequestRecord, RequestObserver]] = {}

    def keep(self, ended: RequestEnded, own: RequestObserver) -> None:
        """Adds a request that the Conductor has ended. The reader of its answer may still change
        the outcome. `own`: the observer of the request's model."""
        record = ended.record
        self._kept[record.request_id] = ended
        self._unsettled[record.request_id] = record, own
        if len(self._kept) > KEPT_RECORDS:
            self._kept.popitem(last=False)

    def settle(self, record: RequestRecord) -> None:
        """Notes that the outcome of a request is final."""
        _, own = self._unsettled.pop(record.request_id)
        now = self._now()
        for observer in (own, *self._observers):
            observer.request_ended(record, now)
        record.forget_gaps()

    def unsettled(self, own: RequestObserver) -> list[RequestRecord]:
        """Returns the records of a model's requests whose outcome is not final yet."""
        return [record for record, each in self._unsettled.values() if each is own]

    def find(self, request_id: str) -> RequestEnded | None:
        return self._kept.get(request_id)

    def newest(self) -> Iterator[RequestRecord]:
        """Yields the requests, the last ended first."""
        return (ended.record for ended in reversed(self._kept.values()))

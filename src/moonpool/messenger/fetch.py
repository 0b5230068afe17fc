"""One fetch: pulls cached blocks of another instance into blocks of our own, in a link's thread."""

from __future__ import annotations

import logging
import time

from moonpool.kvcache.transfers import FetchEnded, PeerAddress
from moonpool.messenger.auth import AuthError
from moonpool.messenger.landing import Landing
from moonpool.messenger.line import Line
from moonpool.messenger.peering import Route
from moonpool.messenger.station import Station
from moonpool.messenger.transport import Connection, ProtocolError, TransportError
from moonpool.messenger.wire import (
    Elsewhere,
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    ReadRenewed,
    Refused,
    Slices,
)
from moonpool.types import BlockKey, InstanceId

_log = logging.getLogger(__name__)


class Fetch:
    """`run` blocks until the fetch ended, and tells how. What arrived before a failure counts."""

    def __init__(
        self,
        fetch_id: str,
        source: InstanceId,
        keys: tuple[BlockKey, ...],
        landing: Landing,
        deadline_s: float,
    ) -> None:
        self.line = Line()
        self._fetch_id = fetch_id
        self._source = source
        self._keys = keys
        self._landing = landing
        self._deadline_s = deadline_s
        self._answered = False
        self._sent_on = False
        self._started_s = time.monotonic()

    def run(self, route: Route, station: Station) -> FetchEnded | PeerAddress:
        """An address: go on there, with another route."""
        error = "failed unexpectedly; see the log"
        try:
            self._pull_by_any_way(route)
            error = ""
        except _ElsewhereError as elsewhere:
            error = ""
            return elsewhere.address
        except (TransportError, AuthError) as failure:
            error = f"fetch from {self._source}: {self.line.explain(failure)}"
            station.counters.failed()
        except Exception:
            _log.exception("fetch from %s", self._source)
        finally:
            self.line.let_go()
            if error and route.connection is not None:
                route.connection.close()
        return FetchEnded(
            fetch_id=self._fetch_id,
            num_blocks=self._landing.verified_prefix(),
            corrupt_slices=self._landing.corrupt_slices,
            num_bytes=self._landing.num_bytes,
            seconds=time.monotonic() - self._started_s,
            error=error,
        )

    def _pull_by_any_way(self, route: Route) -> None:
        """What arrived by a way that failed midway is not asked for again by the next."""
        failure: TransportError | None = None
        while True:
            self._answered = False
            try:
                connection = route.connect(self._deadline_s)
                self.line.hold(connection)
                keys = self._keys[self._landing.restart() :]
                if not route.opened:
                    connection.send(self._request(keys), self._deadline_s)
                self._pull(connection, len(keys))
                return
            except _RefusedError:
                raise
            except TransportError as error:
                failure = failure or error  # the first says more than that the next failed too
                self.line.let_go()
                again = route.fail(self._answered)
                if not again or self.line.broken or time.monotonic() >= self._deadline_s:
                    raise failure from error

    def opening(self) -> ReadBlocks:
        return self._request(self._keys)

    def _request(self, keys: tuple[BlockKey, ...]) -> ReadBlocks:
        return ReadBlocks(keys=keys, timeout_s=max(0.001, self._deadline_s - time.monotonic()))

    def _pull(self, connection: Connection, num_keys: int) -> None:
        deadline_s = self._deadline_s
        granted = connection.receive(deadline_s)
        self._answered = True
        if isinstance(granted, Elsewhere):
            if self._sent_on:
                raise _RefusedError("it was sent on twice")
            self._sent_on = True
            raise _ElsewhereError(granted.address)
        if isinstance(granted, Refused):
            raise _RefusedError(f"refused: {granted.reason}")
        if not isinstance(granted, ReadGranted) or granted.num_blocks > num_keys:
            raise ProtocolError("the answer to a read is not a grant of at most what was asked")
        lease = _Lease(connection, granted.lease_s, deadline_s)
        last = not granted.num_blocks
        while not last:
            message = connection.receive(deadline_s)
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} during a read")
            self._landing.land(connection, message.offers, deadline_s, lease.renew)
            last = message.last
        # All is here. The link sends this when the end has been told, or with the next request.
        connection.hold(ReadReleased(corrupt_slices=self._landing.corrupt_slices))


class _ElsewhereError(Exception):
    """The blocks are kept by another peer."""

    def __init__(self, address: PeerAddress) -> None:
        super().__init__()
        self.address = address


class _RefusedError(TransportError):
    """The source has answered: no other way would lead to another answer."""


class _Lease:
    """Reminds the source, three times per lease, that its blocks are still being read."""

    def __init__(self, connection: Connection, lease_s: float, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._step_s = lease_s / 3
        self._next_s = time.monotonic() + self._step_s

    def renew(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._connection.send(ReadRenewed(), self._deadline_s)
            self._next_s = now_s + self._step_s

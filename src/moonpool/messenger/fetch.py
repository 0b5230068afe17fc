"""One fetch: pulls cached blocks of another instance into blocks of our own, in a link's thread.

One layer of all blocks comes after the other, and whoever waits for a layer is let through as soon
as it is verified; for the last one only when the end has been told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from moonpool.kvcache.transfers import FetchEnded, PeerAddress
from moonpool.messenger.auth import AuthError
from moonpool.messenger.landing import Landing
from moonpool.messenger.line import Line
from moonpool.messenger.peering import Route
from moonpool.messenger.progress import Progress
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
        progress: Progress | None = None,
        part: int = 0,
    ) -> None:
        """`progress` is told how far it, as that `part` of a fetch, has come."""
        self.line = Line()
        self.fetch_id = fetch_id
        self.landing = landing
        self._source = source
        self._keys = keys
        self._deadline_s = deadline_s
        self._progress = progress
        self._part = part
        self._answered = False
        self._sent_on = False
        self._shares: tuple[Fetch, ...] = ()
        self._started_s = time.monotonic()
        self._granted: int | None = None

    def share(self, landing: Landing) -> Fetch:
        """A fetch of what one of several places has of these blocks. Nobody waits at its gate."""
        share = Fetch(self.fetch_id, self._source, self._keys, landing, self._deadline_s)
        share._sent_on = True
        self._shares += (share,)
        if self.line.broken:
            share.line.break_off(self.line.explain(TransportError()))
        return share

    def break_off(self, reason: str) -> None:
        self.line.break_off(reason)
        for share in self._shares:
            share.line.break_off(reason)

    def run(self, route: Route, station: Station) -> FetchEnded | tuple[PeerAddress, ...]:
        """Addresses: go on there, with another route; with several, a share at each."""
        error = "failed unexpectedly; see the log"
        try:
            self._pull_by_any_way(route)
            error = ""
        except _ElsewhereError as elsewhere:
            error = ""
            return elsewhere.addresses
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
            fetch_id=self.fetch_id,
            num_blocks=self.landing.verified_prefix(),
            corrupt_slices=self.landing.corrupt_slices,
            num_bytes=self.landing.num_bytes,
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
                if not route.opened:
                    connection.send(self.opening(), self._deadline_s)
                self._pull(connection)
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
        """Asks for what is not here yet, of what was granted if anything was."""
        return ReadBlocks(
            keys=self._keys[: self._granted],
            timeout_s=max(0.001, self._deadline_s - time.monotonic()),
            first_layer=self._first_layer(),
            cut=self.landing.cut,
        )

    def _first_layer(self) -> int:
        if not self._granted:
            return 0
        return min(self.landing.whole_layers(self._granted), self.landing.num_layers - 1)

    def _pull(self, connection: Connection) -> None:
        deadline_s = self._deadline_s
        granted = connection.receive(deadline_s)
        self._answered = True
        if isinstance(granted, Elsewhere):
            if self._sent_on:
                raise _RefusedError("it was sent on twice")
            self._sent_on = True
            raise _ElsewhereError(granted.addresses)
        if isinstance(granted, Refused):
            raise _RefusedError(f"refused: {granted.reason}")
        asked = len(self._keys) if self._granted is None else self._granted
        if not isinstance(granted, ReadGranted) or granted.num_blocks > asked:
            raise ProtocolError("the answer to a read is not a grant of at most what was asked")
        if max(granted.absent, default=0) >= max(granted.num_blocks, 1):
            raise ProtocolError("blocks are absent that were not granted")
        self.landing.leave_out(granted.absent)
        if granted.num_blocks:
            self.landing.come_from(granted.cut)
        self._granted = granted.num_blocks
        if self._progress is not None:
            self._progress.granted(self._part, granted.num_blocks)
        lease = _Lease(connection, granted.lease_s, deadline_s)
        last = not granted.num_blocks
        while not last:
            message = connection.receive(deadline_s)
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} during a read")
            self.landing.land(connection, message.offers, deadline_s, lease.renew)
            last = message.last
            if self._progress is not None and not last:
                self._tell(self._progress, granted.num_blocks)
        # All is here. The link sends this when the end has been told, or with the next request.
        connection.hold(ReadReleased(corrupt_slices=self.landing.corrupt_slices))

    def _tell(self, progress: Progress, granted: int) -> None:
        if self.landing.corrupt_slices:
            progress.doubt()
        progress.arrived(self._part, self.landing.whole_layers(granted))


def together(ended: Sequence[FetchEnded], num_blocks: int) -> FetchEnded:
    """How a fetch ended of which these are all pieces; together they brought so many blocks."""
    return FetchEnded(
        fetch_id=ended[0].fetch_id,
        num_blocks=num_blocks,
        corrupt_slices=sum(e.corrupt_slices for e in ended),
        num_bytes=sum(e.num_bytes for e in ended),
        seconds=max(e.seconds for e in ended),
        error=next((e.error for e in ended if e.error), ""),
    )


class _ElsewhereError(Exception):
    """The blocks are kept by another peer."""

    def __init__(self, addresses: tuple[PeerAddress, ...]) -> None:
        super().__init__()
        self.addresses = addresses


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

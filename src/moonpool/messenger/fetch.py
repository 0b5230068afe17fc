"""One fetch: pulls cached blocks of another instance into blocks of our own, in a link's thread.

One layer of all blocks comes after the other, and whoever waits for a layer at the fetch's gate is
let through as soon as it is verified; for the last one only when the end has been told.
"""

from __future__ import annotations

import logging
import time

from moonpool.kvcache.transfers import FetchEnded, FetchProgress, PeerAddress
from moonpool.messenger.auth import AuthError
from moonpool.messenger.gate import LayerGate, tells_progress
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
        gate: LayerGate | None = None,
    ) -> None:
        """With a `gate`, it is told how far the fetch has come."""
        self.line = Line()
        self.fetch_id = fetch_id
        self.landing = landing
        self._source = source
        self._keys = keys
        self._deadline_s = deadline_s
        self._gate = gate
        self._answered = False
        self._sent_on = False
        self._shares: tuple[Fetch, ...] = ()
        self._started_s = time.monotonic()
        self._granted: int | None = None
        self._granted_s = 0.0
        self._told_layers = 0

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
            self._pull_by_any_way(route, station)
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

    def tell_end(self, ended: FetchEnded, station: Station) -> None:
        station.post(ended)
        if self._gate is not None:
            self._gate.end(not ended.error and ended.num_blocks == self._granted)

    def _pull_by_any_way(self, route: Route, station: Station) -> None:
        """What arrived by a way that failed midway is not asked for again by the next."""
        failure: TransportError | None = None
        while True:
            self._answered = False
            try:
                connection = route.connect(self._deadline_s)
                self.line.hold(connection)
                if not route.opened:
                    connection.send(self.opening(), self._deadline_s)
                self._pull(connection, station)
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

    def _pull(self, connection: Connection, station: Station) -> None:
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
        self._begin(granted.num_blocks, station)
        lease = _Lease(connection, granted.lease_s, deadline_s)
        last = not granted.num_blocks
        while not last:
            message = connection.receive(deadline_s)
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} during a read")
            self.landing.land(connection, message.offers, deadline_s, lease.renew)
            last = message.last
            if self._gate is not None and not last:
                self._tell_progress(self._gate, station)
        # All is here. The link sends this when the end has been told, or with the next request.
        connection.hold(ReadReleased(corrupt_slices=self.landing.corrupt_slices))

    def _begin(self, num_blocks: int, station: Station) -> None:
        if self._gate is None:
            self._granted = num_blocks
            return
        if self._granted is None:
            self._granted_s = time.monotonic()
        elif num_blocks < self._granted:
            self._gate.break_off()  # somebody may have counted on all of them
        self._granted = num_blocks
        station.post(FetchProgress(fetch_id=self.fetch_id, num_blocks=num_blocks))

    def _tell_progress(self, gate: LayerGate, station: Station) -> None:
        if self.landing.corrupt_slices:
            gate.break_off()
        assert self._granted is not None
        all_layers = station.arena.layout.num_layers
        num_layers = min(self.landing.whole_layers(self._granted), all_layers - 1)
        if num_layers == self._told_layers:
            return
        gate.open(num_layers)
        for layers in range(num_layers, self._told_layers, -1):
            if tells_progress(layers, all_layers):
                seconds = time.monotonic() - self._granted_s
                event = FetchProgress(self.fetch_id, self._granted, num_layers, seconds)
                station.post(event)
                break
        self._told_layers = num_layers


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

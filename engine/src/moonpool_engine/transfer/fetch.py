"""A fetch: copies cached blocks of another instance into blocks of this one.

A `Fetch` consists of `_Transfer`s, each over one connection. Their number has two causes:

- Parts. A large fetch over TCP is split by blocks over several connections. Between machines, one
  TCP connection is limited by the copying of one core or by the network's limit for one flow (5 or
  10 Gbit/s in clouds), not by the line. Even over the loopback, two connections wait less than one.
- Shares. If the source redirects a part to several peers, each of which stores a share of the
  blocks or of every slice, one transfer per peer follows. The part ends when all of these transfers
  have ended.

Each transfer brings layer after layer of all its blocks. When a layer is verified in all parts, the
fetch's `LayerGate` opens for it. The gate of the last layer opens only after the end was reported.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from moonpool.link.auth import AuthError
from moonpool.protocol.transfer_events import FetchEnded, PeerAddress
from moonpool.types import BlockId, BlockKey
from moonpool_engine.transfer.connection import CancellableConnection, Connection
from moonpool_engine.transfer.connection_pool import Completion, ConnectionPool, Connector
from moonpool_engine.transfer.context import TransferContext
from moonpool_engine.transfer.errors import ProtocolError, TransportError
from moonpool_engine.transfer.gate import FetchProgressReporter, LayerGate
from moonpool_engine.transfer.slice_receiver import count_covered_blocks
from moonpool_engine.transfer.wire import (
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    ReadRenewed,
    Redirect,
    Refused,
    Slices,
)

PART_BYTES = 4 << 20
"""The least bytes that justify a connection of their own."""
_log = logging.getLogger(__name__)


def split(num_blocks: int, block_bytes: int, most_parts: int) -> list[range]:
    """Splits blocks into at most `most_parts` ranges whose lengths differ by at most one."""
    num_parts = max(1, min(most_parts, num_blocks * block_bytes // PART_BYTES, num_blocks))
    ends = [num_blocks * part // num_parts for part in range(num_parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """What a fetch copies: block `keys[i]` of the source into `block_ids[i]` of this instance, by
    the deadline (`time.monotonic`)."""

    fetch_id: str
    source: PeerAddress
    keys: Sequence[BlockKey]
    block_ids: Sequence[BlockId]
    deadline_s: float

    def part(self, blocks: range) -> WantedBlocks:
        keys = tuple(self.keys[blocks.start : blocks.stop])
        return replace(self, keys=keys, block_ids=self.block_ids[blocks.start : blocks.stop])


class Fetch:
    """All transfers that one fetch consists of. Thread-safe. Posts FetchEnded once, when the last
    has ended."""

    def __init__(
        self,
        context: TransferContext,
        pool: ConnectionPool,
        wanted: WantedBlocks,
        max_connections: int,
        gate: LayerGate | None,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called before the end event is posted. Raises ValueError if a block is
        outside the arena."""
        self._context = context
        self._pool = pool
        self._source = wanted.source
        self._on_end = on_end
        self._ranges = split(len(wanted.keys), context.arena.layout.block_bytes, max_connections)
        self._progress: FetchProgressReporter | None = None
        if gate is not None:
            requested, num_layers = [*map(len, self._ranges)], context.arena.layout.num_layers
            self._progress = FetchProgressReporter(
                wanted.fetch_id, requested, num_layers, gate, context.post
            )
        self._lock = threading.Lock()  # guards the fields below
        self._cancel_reason = ""
        self._transfers = [
            [self._make_transfer(number, wanted.part(part))]
            for number, part in enumerate(self._ranges)
        ]
        self._ended: list[list[FetchEnded]] = [[] for _ in self._ranges]
        self._part_results: dict[int, FetchEnded] = {}

    def start(self) -> None:
        """Starts one transfer per part, and returns at once."""
        for (transfer,) in list(self._transfers):
            self._run(transfer, self._source)

    def cancel(self, reason: str) -> None:
        """Ends the fetch early, with the blocks that have arrived."""
        with self._lock:
            self._cancel_reason = self._cancel_reason or reason
            transfers = [transfer for part in self._transfers for transfer in part]
        for transfer in transfers:
            transfer.connection.cancel(reason)

    def _make_transfer(self, part: int, wanted: WantedBlocks, is_share: bool = False) -> _Transfer:
        progress = None if is_share else self._progress
        return _Transfer(self._context, wanted, part, progress, is_share)

    def _run(self, transfer: _Transfer, address: PeerAddress) -> None:
        self._pool.run(address, partial(self._operate, transfer), transfer.opening())

    def _operate(self, transfer: _Transfer, connector: Connector) -> Completion:
        """Runs a transfer in its connection's thread. Returns what to do afterwards."""
        ended = transfer.run(connector)
        if not isinstance(ended, FetchEnded):
            return partial(self._redirect, transfer, ended)
        result = self._transfer_ended(transfer.part, ended)
        if result is None:
            return _nothing
        self._on_end()
        return partial(self._report, result)

    def _redirect(self, transfer: _Transfer, addresses: Sequence[PeerAddress]) -> None:
        if len(addresses) == 1:
            self._run(transfer, addresses[0])
            return
        with self._lock:
            shares = [
                self._make_transfer(transfer.part, transfer.wanted, is_share=True)
                for _ in addresses
            ]
            self._transfers[transfer.part] = shares
            if self._cancel_reason:
                for share in shares:
                    share.connection.cancel(self._cancel_reason)
        for address, share in zip(addresses, shares, strict=True):
            self._run(share, address)

    def _transfer_ended(self, part: int, ended: FetchEnded) -> FetchEnded | None:
        """Returns the result of the fetch if this was its last transfer."""
        with self._lock:
            self._ended[part].append(ended)
            if len(self._ended[part]) < len(self._transfers[part]):
                return None
        result = self._part_result(part)
        if result.error and self._progress is not None:
            self._progress.break_gate()  # breaks the gate without waiting for other parts
        with self._lock:
            self._part_results[part] = result
            if len(self._part_results) < len(self._ranges):
                return None
        in_order = [self._part_results[part] for part in range(len(self._ranges))]
        return _combine(in_order, self._leading_blocks(in_order))

    def _part_result(self, part: int) -> FetchEnded:
        ended, transfers = self._ended[part], self._transfers[part]
        if len(transfers) == 1:
            return ended[0]
        return _combine(ended, count_covered_blocks([share.receiver for share in transfers]))

    def _leading_blocks(self, in_order: Sequence[FetchEnded]) -> int:
        """Returns the number of blocks before the first that did not arrive."""
        total = 0
        for blocks, ended in zip(self._ranges, in_order, strict=True):
            total += ended.num_blocks
            if ended.num_blocks < len(blocks):
                break
        return total

    def _report(self, result: FetchEnded) -> None:
        self._context.post(result)
        if self._progress is not None:
            self._progress.end(result)


def _combine(ended: Sequence[FetchEnded], num_blocks: int) -> FetchEnded:
    return FetchEnded(
        fetch_id=ended[0].fetch_id,
        num_blocks=num_blocks,
        corrupt_slices=sum(e.corrupt_slices for e in ended),
        num_bytes=sum(e.num_bytes for e in ended),
        seconds=max(e.seconds for e in ended),
        error=next((e.error for e in ended if e.error), ""),
    )


def _nothing() -> None:
    """Ends a transfer whose fetch still has other transfers."""


class _Transfer:
    """Fetches some blocks over one connection. Data that arrived before a failure counts."""

    def __init__(
        self,
        context: TransferContext,
        wanted: WantedBlocks,
        part: int,
        progress: FetchProgressReporter | None,
        is_share: bool,
    ) -> None:
        """`is_share`: whether the peer sends only a share of each block or slice, and other peers
        send the rest."""
        self.connection = CancellableConnection()
        self.wanted = wanted
        self.part = part
        self.receiver = context.slice_receiver(wanted.block_ids)
        self._context = context
        self._source = wanted.source.instance_id
        self._deadline_s = wanted.deadline_s
        self._progress = progress
        self._answered = False
        self._redirected = is_share
        self._started_s = time.monotonic()
        self._granted: int | None = None

    def run(self, connector: Connector) -> FetchEnded | tuple[PeerAddress, ...]:
        """Blocks until the transfer has ended. Returns addresses if the source redirected it: to
        one peer that stores the blocks, or to several that store a share each."""
        error = "failed unexpectedly; see the log"
        try:
            self._read_with_fallback(connector)
            error = ""
        except _RedirectError as redirect:
            error = ""
            return redirect.addresses
        except (TransportError, AuthError) as failure:
            error = f"fetch from {self._source}: {self.connection.explain(failure)}"
            self._context.counters.failed()
        except Exception:
            _log.exception("fetch from %s", self._source)
        finally:
            self.connection.detach()
            if error and connector.connection is not None:
                connector.connection.close()
        self.receiver.tell_damage(f"fetch from {self._source}")
        return FetchEnded(
            fetch_id=self.wanted.fetch_id,
            num_blocks=self.receiver.complete_blocks(),
            corrupt_slices=self.receiver.corrupt_slices,
            num_bytes=self.receiver.num_bytes,
            seconds=time.monotonic() - self._started_s,
            error=error,
        )

    def opening(self) -> ReadBlocks:
        """Requests the layers that have not arrived, of the granted blocks if any were granted."""
        receiver, first_layer = self.receiver, 0
        if self._granted:
            first_layer = min(receiver.complete_layers(self._granted), receiver.num_layers - 1)
        return ReadBlocks(
            keys=tuple(self.wanted.keys[: self._granted]),
            timeout_s=max(0.001, self._deadline_s - time.monotonic()),
            first_layer=first_layer,
            shard_view=receiver.shard_view,
        )

    def _read_with_fallback(self, connector: Connector) -> None:
        """Tries one transport after another. Each transport requests only what has not arrived."""
        failure: TransportError | None = None
        while True:
            self._answered = False
            try:
                connection = connector.connect(self._deadline_s)
                self.connection.attach(connection)
                if not connector.opening_sent:
                    connection.send(self.opening(), self._deadline_s)
                self._read(connection)
                return
            except _RefusedError:
                raise
            except TransportError as error:
                failure = failure or error  # the first failure tells more than the last one
                self.connection.detach()
                again = connector.fail(self._answered)
                if not again or self.connection.cancelled or time.monotonic() >= self._deadline_s:
                    raise failure from error

    def _read(self, connection: Connection) -> None:
        deadline_s, receiver, progress = self._deadline_s, self.receiver, self._progress
        granted = self._await_grant(connection)
        if progress is not None:
            progress.granted(self.part, granted.num_blocks)
        lease = _Lease(connection, granted.lease_s, deadline_s)
        last = not granted.num_blocks
        while not last:
            message = connection.receive(deadline_s)
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} during a read")
            receiver.receive(connection, message.offers, deadline_s, lease.renew)
            last = message.last
            if progress is not None and not last:
                if receiver.corrupt_slices:
                    progress.break_gate()
                progress.arrived(self.part, receiver.complete_layers(granted.num_blocks))
        # Goes out after the end is reported, or with the next operation's opening message.
        connection.queue(ReadReleased(corrupt_slices=receiver.corrupt_slices))

    def _await_grant(self, connection: Connection) -> ReadGranted:
        granted = connection.receive(self._deadline_s)
        self._answered = True
        if isinstance(granted, Redirect):
            if self._redirected:
                raise _RefusedError("the read was redirected twice")
            self._redirected = True
            raise _RedirectError(granted.addresses)
        if isinstance(granted, Refused):
            raise _RefusedError(f"refused: {granted.reason}")
        requested = len(self.wanted.keys) if self._granted is None else self._granted
        if not isinstance(granted, ReadGranted) or granted.num_blocks > requested:
            raise ProtocolError("the answer to a read is not a grant of at most what was requested")
        if max(granted.absent, default=0) >= max(granted.num_blocks, 1):
            raise ProtocolError("blocks are absent that were not granted")
        self.receiver.skip(granted.absent)
        if granted.num_blocks:
            self.receiver.set_source_view(granted.shard_view)
        self._granted = granted.num_blocks
        return granted


class _RedirectError(Exception):
    """Raised because other peers store the blocks."""

    def __init__(self, addresses: tuple[PeerAddress, ...]) -> None:
        super().__init__()
        self.addresses = addresses


class _RefusedError(TransportError):
    """The source has refused: no other transport would change its answer."""


class _Lease:
    """Renews the read's lease at the source, three times per lease."""

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

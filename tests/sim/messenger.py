"""A fake messenger, which moves block contents between arenas late, out of order and with faults.

It follows the contract of `moonpool.protocol.transfer_events` exactly and uses all of the
contract's freedom: it reads and writes blocks at random times until the terminal event, even after
an abort. Each access checks that the instance still holds the block, and each write that the block
has no key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.protocol.transfer_events import (
    FetchEnded,
    FetchProgress,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId, BlockKey
from tests.sim.truth import Content

if TYPE_CHECKING:
    from tests.sim.node import Life

EARLY_STREAM_S = 3.0
"""The time for which a stream waits for a receiver that does not expect it yet."""
GARBAGE: Content = (-1, -1)


@dataclass(eq=False)
class Arrivals:
    """Records which slices of an operation have arrived, and which of them are correct."""

    life: Life
    block_ids: Sequence[BlockId]
    first_index: int = 0
    verified: set[tuple[int, int]] = field(default_factory=set)
    num_corrupt: int = 0

    def land(self, index: int, layer: int, content: Content, corrupt: bool) -> None:
        if index < self.first_index:
            return
        block_id = self.block_ids[index - self.first_index]
        self.life.write(block_id, layer, GARBAGE if corrupt else content)
        self.num_corrupt += corrupt
        self.life.num_damaged += corrupt
        if corrupt:
            self.verified.discard((index, layer))  # an earlier copy of this slice may have arrived
        else:
            self.verified.add((index, layer))

    def complete(self, index: int) -> bool:
        return all((index, layer) in self.verified for layer in range(self.life.num_layers))

    def incomplete(self) -> tuple[int, ...]:
        indices = range(self.first_index, self.first_index + len(self.block_ids))
        return tuple(index for index in indices if not self.complete(index))

    def num_leading(self) -> int:
        missing = self.incomplete()
        return missing[0] - self.first_index if missing else len(self.block_ids)


class FetchOperation:
    """One fetch, with its reading and its writing end."""

    def __init__(
        self,
        life: Life,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
    ) -> None:
        assert len(keys) == len(block_ids) > 0
        self.life = life
        self.fetch_id = fetch_id
        self.source: Life | None = None
        self._source_address = source
        self._keys = tuple(keys)
        self._arrivals = Arrivals(life, tuple(block_ids))
        self._fetch_ended = False
        self._failed = False
        self._num_granted = 0
        self._granted_s = -1.0
        self._num_layers = 0
        self._read_ended = True  # true until the source receives the request
        self._read_id = f"{fetch_id}@{life.number}"
        life.world.operations.append(self)
        life.later(self._connect)
        life.clock.after(timeout_s, lambda: self._end_fetch("timed out"))

    def _connect(self) -> None:
        if self._fetch_ended:  # the fetch has timed out already
            return
        world = self.life.world
        source = world.find_life(self._source_address)
        if source is None or world.chance("refuse_connection_rate"):
            self._end_fetch("no connection")
            return
        self.source = source
        self._read_ended = False
        source.reads[self._read_id] = self
        source.post(ReadRequested(read_id=self._read_id, keys=self._keys))

    def on_granted(self, block_ids: Sequence[BlockId]) -> None:
        assert self.source is not None and len(block_ids) <= len(self._keys)
        layers = range(self.life.num_layers)
        slices = deque((i, layer, b) for layer in layers for i, b in enumerate(block_ids))
        self._num_granted = len(block_ids)
        self.source.later(lambda: self._pump(slices))

    def brought(self, layer: int) -> bool | None:
        """Whether the layer of all granted blocks has arrived, or None if it may still arrive. The
        last layer counts as arrived only after the end of the fetch was posted."""
        last = self.life.num_layers - 1
        if self._fetch_ended:
            return not self._failed or (layer < last and self._whole(layer))
        return True if layer < last and self._granted_s >= 0 and self._whole(layer) else None

    def _whole(self, layer: int) -> bool:
        return all((i, layer) in self._arrivals.verified for i in range(self._num_granted))

    def _tell_progress(self) -> None:
        """Posts the progress at the grant and when layers are complete; some reports come late."""
        if self._fetch_ended:
            return
        now = self.life.clock.now
        if self._granted_s < 0:
            self._granted_s = now
        elif not self._whole(self._num_layers) or self._num_layers == self.life.num_layers - 1:
            return
        else:
            self._num_layers += 1
        seconds = now - self._granted_s
        event = FetchProgress(self.fetch_id, self._num_granted, self._num_layers, seconds)
        self.life.post(event)

    def _pump(self, slices: deque[tuple[int, int, BlockId]]) -> None:
        if self._read_ended or self.source is None:
            return
        if self.life.world.chance("break_rate", 0.3):
            self.on_died(None)
            return
        if self.life.world.chance("stall_rate", 0.3):
            return  # the fetch hangs until its timeout
        if self._num_granted:
            self._tell_progress()
        if not slices:
            self._end_read("")
            self.life.later(lambda: self._end_fetch(""))
            return
        index, layer, block_id = slices.popleft()
        content = self.source.read(block_id, layer)
        corrupt = self.life.world.chance("corrupt_rate")
        if not self._fetch_ended and not self.life.world.chance("missing_rate"):
            self._arrivals.land(index, layer, content, corrupt)
        self.source.later(lambda: self._pump(slices))

    def on_died(self, life: Life | None) -> None:
        """Ends one of the two ends, or the connection (None). The ends that remain notice after a
        delay."""
        if self.source is not None and life is not self.source:
            self.source.later(lambda: self._end_read("broken"))
        if life is not self.life and (self.source is not None or life is None):
            self.life.later(lambda: self._end_fetch("broken"))

    def _end_read(self, error: str) -> None:
        if self._read_ended or self.source is None:
            return
        self._read_ended = True
        del self.source.reads[self._read_id]
        self.source.post(ReadEnded(read_id=self._read_id, error=error))

    def _end_fetch(self, error: str) -> None:
        if self._fetch_ended:
            return
        self._fetch_ended = True
        if self.source is not None:
            self.source.later(lambda: self._end_read("the peer gave up"))
        self._failed = bool(error) or self._arrivals.num_leading() < self._num_granted
        self.life.post(
            FetchEnded(
                fetch_id=self.fetch_id,
                num_blocks=self._arrivals.num_leading(),
                corrupt_slices=self._arrivals.num_corrupt,
                error=error,
            )
        )


class StreamOperation:
    """One layer stream with both ends, from its opening by the sender."""

    def __init__(self, life: Life, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        self.life = life
        self.stream_id = stream_id
        self.receiver: Life | None = None
        self._target = target
        self._queue: deque[tuple[int, int, BlockId] | None] = deque()  # None means the end
        self._arrivals: Arrivals | None = None
        self._pumping = False
        self._send_ended = False
        life.world.operations.append(self)
        life.sends[stream_id] = self
        life.later(self._connect)
        life.clock.after(timeout_s, lambda: self._end_send("timed out"))

    def put(self, *items: tuple[int, int, BlockId] | None) -> None:
        self._queue.extend(items)
        self._pump_later()

    def abort(self) -> None:
        self.life.later(lambda: self.on_died(None))

    def _connect(self) -> None:
        if self._send_ended:
            return
        world = self.life.world
        receiver = world.find_life(self._target)
        if receiver is None or world.chance("refuse_connection_rate"):
            self._end_send("no connection")
            return
        self.receiver = receiver
        if self.stream_id in receiver.receives:
            self.on_expected(receiver.receives[self.stream_id])
        else:
            receiver.early_streams[self.stream_id] = self
            receiver.clock.after(EARLY_STREAM_S, self._give_up_early)

    def _give_up_early(self) -> None:
        assert self.receiver is not None
        if self.receiver.early_streams.pop(self.stream_id, None) is not None:
            self.on_died(None)

    def on_expected(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._pump_later()

    def _pump_later(self) -> None:
        if not self._pumping and self._queue and self._arrivals is not None:
            self._pumping = True
            self.life.later(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._send_ended or self._arrivals is None or self.receiver is None:
            return
        world = self.life.world
        if world.chance("break_rate", 0.2):
            self.on_died(None)
            return
        item = self._queue.popleft()
        if item is None:
            self.receiver.end_receive(self.stream_id, "")
            self.life.later(lambda: self._end_send(""))
            return
        index, layer, block_id = item
        if index >= self._arrivals.first_index:
            content = self.life.read(block_id, layer)
            expected = self.receiver.receives.get(self.stream_id) is self._arrivals
            if not expected:
                self.on_died(None)
                return
            if not world.chance("missing_rate"):
                self._arrivals.land(index, layer, content, world.chance("corrupt_rate"))
        self._pump_later()

    def on_died(self, life: Life | None) -> None:
        if life is not self.life:
            self.life.later(lambda: self._end_send("broken"))
        receiver = self.receiver
        if receiver is not None and life is not receiver and self._arrivals is not None:
            receiver.later(lambda: receiver.end_receive(self.stream_id, "broken"))

    def _end_send(self, error: str) -> None:
        if self._send_ended:
            return
        self._send_ended = True
        del self.life.sends[self.stream_id]
        self.life.post(SendEnded(stream_id=self.stream_id, error=error))


def receive_ended(stream_id: str, arrivals: Arrivals, error: str) -> ReceiveEnded:
    return ReceiveEnded(
        stream_id=stream_id,
        incomplete=arrivals.incomplete(),
        corrupt_slices=arrivals.num_corrupt,
        error=error,
    )

"""Simulates the messenger of an instance, which transfers KVCache in virtual time.

Bytes cross shared links: the sender's NIC out and the receiver's NIC in. Streams to a decode
instance then cross its PCIe, from DRAM to the accelerators (Mooncake section 3, step 4). With
layer-wise transfer, the blocks of a chunk leave while the chunk is computed, and no faster than it
produces them. Without layer-wise transfer, the blocks leave when the whole chunk is computed (v3
section 5.2).

Fetches move layer after layer in up to PROGRESS_PARTS parts, with a progress event after each part.
So do loads from the SSD that ask for progress events.

An SSD has two links, one per direction. When a peer fetches blocks from the SSD, the source reads
the blocks over its SSD link before the NIC transfer starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    FetchEnded,
    FetchProgress,
    LoadEnded,
    LoadProgress,
    MessengerEvent,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
    StoreEnded,
)
from moonpool.scheduler.actions import (
    Arriving,
    ExpectStream,
    FetchBlocks,
    LoadBlocks,
    StepEntry,
    StoreBlocks,
)
from moonpool.sim.clock import Priority, Timer
from moonpool.sim.network import Flow, Link, Network
from moonpool.types import BlockId, InstanceId

SSD_LATENCY_S = 1e-4
PROGRESS_PARTS = 8
PARK_S = 5.0
"""The seconds that a sender waits until the receiver expects its stream."""

Ended = Callable[[bool], None]
"""A callback that is called once, with whether all blocks arrived."""
_Name = tuple[str, str]
"""The name of a transfer: "fetch" or "load", and its id."""


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The network and SSD links of an instance."""

    nic_in: Link
    nic_out: Link
    pcie: Link
    ssd_read: Link | None = None
    ssd_write: Link | None = None


@dataclass(slots=True)
class TransferFigures:
    """The totals of one messenger."""

    num_bytes: int = 0
    seconds: float = 0.0
    num_fetches: int = 0
    fetched_bytes: int = 0
    fetching_s: float = 0.0
    num_streams: int = 0
    num_stores: int = 0
    stored_bytes: int = 0
    storing_s: float = 0.0
    num_loads: int = 0
    loaded_bytes: int = 0
    loading_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Stream:
    """A layer stream under way."""

    stream_id: str
    sender: SimMessenger
    receiver: SimMessenger
    first_index: int
    last_index: int
    began_s: float
    flows: list[Flow] = field(default_factory=list)
    num_bytes: int = 0
    finished: bool = False
    ended: bool = False
    # slices that were sent before the receiver was ready
    early: list[Sequence[tuple[int, BlockId]]] | None = None


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch under way."""

    action: FetchBlocks
    reader: SimMessenger
    source: SimMessenger
    began_s: float
    timer: Timer | None = None
    flow: Flow | None = None
    granted: int = 0
    granted_s: float = 0.0


class SimMessenger:
    """Performs transfers. Each transfer ends with exactly one terminal event, which is never posted
    from within the call that starts the transfer."""

    def __init__(
        self,
        instance_id: InstanceId,
        network: Network,
        links: NodeLinks,
        layout: BlockLayout,
        latency_s: float,
        layer_wise: bool,
        post: Callable[[MessengerEvent], None],
        peers: dict[InstanceId, SimMessenger],
    ) -> None:
        self.figures = TransferFigures()
        self.gone = False  # whether this instance has left
        self._id = instance_id
        self._clock = network.clock
        self._network = network
        self._links = links
        self._block_bytes = layout.block_bytes
        self._latency_s = latency_s
        self._layer_wise = layer_wise
        self._num_layers = layout.num_layers
        self._waiting: dict[_Name, list[Ended]] = {}  # callbacks by transfer
        self._under_way: set[_Name] = set()
        self._post = post
        self._peers = peers
        self._expected: dict[str, ExpectStream] = {}
        self._outgoing: dict[str, _Stream] = {}
        self._incoming: dict[str, _Stream] = {}
        self._early: dict[str, _Stream] = {}  # streams that their receiver does not expect yet
        self._reads: dict[str, _Fetch] = {}
        self._num_reads = 0
        peers[instance_id] = self

    # Layer streams

    def expect(self, action: ExpectStream) -> None:
        self._expected[action.stream_id] = action
        stream = self._early.pop(action.stream_id, None)
        if stream is not None:
            self._accept(stream)

    def open_stream(self, stream_id: str, target: InstanceId) -> None:
        receiver = self._peers[target]
        stream = _Stream(stream_id, self, receiver, 0, 0, self._clock.now, early=[])
        self._outgoing[stream_id] = stream
        if stream_id in receiver._expected:
            receiver._accept(stream)
        else:
            receiver._early[stream_id] = stream
            self._clock.after(PARK_S, Priority.FAULT, receiver._refuse, stream)

    def _accept(self, stream: _Stream) -> None:
        """Starts to receive a stream, from the first block that the receiver lacks."""
        expected = self._expected[stream.stream_id]
        stream.first_index = expected.first_index
        stream.last_index = expected.first_index + len(expected.block_ids)
        self._incoming[stream.stream_id] = stream
        sender = stream.sender
        sender.figures.num_streams += 1
        early, stream.early = stream.early, None
        for blocks in early or ():
            sender._send(stream.stream_id, blocks, 0.0)
        sender._end_if_done(stream)

    def _refuse(self, stream: _Stream) -> None:
        if self._early.get(stream.stream_id) is stream:
            self._break(stream, "the receiver does not expect this stream")

    def send(self, stream_id: str, blocks: Sequence[tuple[int, BlockId]]) -> None:
        """Sends complete blocks."""
        self._send(stream_id, blocks, 0.0)

    def send_while_computed(self, entry: StepEntry, start_s: float, end_s: float) -> None:
        """Sends the blocks that a step completes, layer by layer while it runs or at its end."""
        if entry.attempt_id not in self._outgoing:
            return
        if self._layer_wise:
            self._clock.at(
                start_s,
                Priority.TRANSFER_END,
                self._send,
                entry.attempt_id,
                entry.sends,
                end_s - start_s,
            )
        else:
            self._clock.at(
                end_s, Priority.TRANSFER_END, self._send, entry.attempt_id, entry.sends, 0.0
            )

    def finish_stream(self, stream_id: str) -> None:
        stream = self._outgoing.get(stream_id)
        if stream is not None:
            stream.finished = True
            self._end_if_done(stream)

    def abort_stream(self, stream_id: str) -> None:
        stream = self._outgoing.get(stream_id)
        if stream is not None:
            self._break(stream, "the sender aborted it")

    def cancel_stream(self, stream_id: str) -> None:
        stream = self._incoming.get(stream_id)
        if stream is not None:
            self._break(stream, "the receiver cancelled it")
        elif stream_id in self._expected:
            del self._expected[stream_id]
            self._post_later(ReceiveEnded(stream_id=stream_id, error="cancelled"))

    def _send(self, stream_id: str, blocks: Sequence[tuple[int, BlockId]], over_s: float) -> None:
        stream = self._outgoing.get(stream_id)
        if stream is None or stream.ended:
            return
        if stream.early is not None:
            stream.early.append(blocks)
            return
        # The receiver already has the blocks before `first_index`; `blocks` is in prompt order.
        num_blocks = len(blocks) - bisect_left(blocks, stream.first_index, key=itemgetter(0))
        if not num_blocks:
            return
        num_bytes = num_blocks * self._block_bytes
        stream.num_bytes += num_bytes
        path = (self._links.nic_out, stream.receiver._links.nic_in)
        limit = num_bytes / over_s if over_s > 0 else float("inf")
        stream.flows.append(
            self._network.start(
                path,
                num_bytes,
                lambda flow: self._on_flow_end(stream, flow),
                limit_bytes_per_s=limit,
                latency_s=self._latency_s,
            )
        )

    def _on_flow_end(self, stream: _Stream, flow: Flow) -> None:
        stream.flows.remove(flow)
        self._end_if_done(stream)

    def _end_if_done(self, stream: _Stream) -> None:
        if stream.flows or not stream.finished or stream.ended or stream.early is not None:
            return
        stream.ended = True
        seconds = self._clock.now - stream.began_s
        figures, receiver = self.figures, stream.receiver
        figures.num_bytes += stream.num_bytes
        figures.seconds += seconds
        del self._outgoing[stream.stream_id]
        self._post_later(
            SendEnded(stream_id=stream.stream_id, num_bytes=stream.num_bytes, seconds=seconds)
        )
        stream.flows.append(
            receiver._network.start(
                (receiver._links.pcie,), stream.num_bytes, lambda _: receiver._on_loaded(stream)
            )
        )

    def _on_loaded(self, stream: _Stream) -> None:
        """Ends a stream, whose KVCache has reached the memory of the accelerators."""
        del self._incoming[stream.stream_id], self._expected[stream.stream_id]
        self._post(
            ReceiveEnded(
                stream_id=stream.stream_id,
                num_bytes=stream.num_bytes,
                seconds=self._clock.now - stream.began_s,
            )
        )

    def _break(self, stream: _Stream, error: str) -> None:
        for flow in stream.flows:
            flow.cancel()
        stream.flows.clear()
        sender, receiver, stream_id = stream.sender, stream.receiver, stream.stream_id
        if not stream.ended:
            stream.ended = True
            del sender._outgoing[stream_id]
            sender._post_later(SendEnded(stream_id=stream_id, error=error))
        receiver._early.pop(stream_id, None)
        if receiver._incoming.pop(stream_id, None) is not None:
            del receiver._expected[stream_id]
            missing = tuple(range(stream.first_index, stream.last_index))
            receiver._post_later(ReceiveEnded(stream_id=stream_id, incomplete=missing, error=error))

    # Fetches

    def fetch(self, action: FetchBlocks) -> None:
        self._under_way.add(("fetch", action.fetch_id))
        source = self._peers[action.source.instance_id]
        fetch = _Fetch(action, self, source, self._clock.now)
        fetch.timer = self._clock.after(
            action.timeout_s, Priority.FAULT, self._end_fetch, fetch, "timeout"
        )
        self._clock.after(self._latency_s, Priority.MESSAGE, source._on_read, fetch)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        fetch = self._reads.get(read_id)
        if fetch is None:
            return  # the reader timed out while the SSD was read
        fetch.granted = len(block_ids)
        path = (self._links.nic_out, fetch.reader._links.nic_in)

        def set_flow(flow: Flow) -> None:
            fetch.flow = flow

        def report_layers(num_layers: int) -> None:
            seconds = self._clock.now - fetch.granted_s
            fetch.reader._post(
                FetchProgress(fetch.action.fetch_id, fetch.granted, num_layers, seconds)
            )

        def report_grant() -> None:
            fetch.granted_s = self._clock.now
            if fetch.timer is not None:
                fetch.reader._post(FetchProgress(fetch.action.fetch_id, fetch.granted))

        if self._layer_wise and fetch.granted:
            self._clock.after(self._latency_s, Priority.MESSAGE, report_grant)
        num_bytes = fetch.granted * self._block_bytes
        end = lambda: self._end_read(read_id, "")  # noqa: E731
        self._start_parts(path, num_bytes, self._latency_s, set_flow, report_layers, end)

    def _start_parts(
        self,
        path: tuple[Link, ...],
        num_bytes: int,
        latency_s: float,
        on_part: Callable[[Flow], None],
        report_layers: Callable[[int], None],
        end: Callable[[], None],
        by_layer: bool = True,
    ) -> None:
        """Transfers the layers part by part.

        Calls `on_part` with the flow of each part, `report_layers` with the number of layers
        present after every part but the last, and `end` after the last.
        """
        by_layer = by_layer and self._layer_wise and num_bytes > 0
        parts = min(PROGRESS_PARTS, self._num_layers) if by_layer else 1

        def start(part: int, latency_s: float) -> None:
            part_bytes = num_bytes * (part + 1) // parts - num_bytes * part // parts
            on_part(
                self._network.start(path, part_bytes, lambda _: ended(part), latency_s=latency_s)
            )

        def ended(part: int) -> None:
            if part + 1 == parts:
                end()
                return
            start(part + 1, 0.0)
            report_layers(self._num_layers * (part + 1) // parts)

        start(0, latency_s)

    def when_arrived(self, arriving: Arriving, on_end: Ended) -> None:
        """Calls `on_end` once: when all these transfers have ended and their events were posted, at
        the timeout, or when a transfer fails. If all have ended already, calls it at once."""
        names: list[_Name] = [("load", load_id) for load_id in arriving.load_ids]
        if arriving.fetch_id:
            names.append(("fetch", arriving.fetch_id))
        left = [name for name in names if name in self._under_way]
        num_left, done = len(left), False

        def finish(complete: bool) -> None:
            nonlocal num_left, done
            num_left -= 1
            if not done and (not complete or num_left <= 0):
                done = True
                timer.cancel()
                on_end(complete)

        timer = self._clock.after(arriving.timeout_s, Priority.FAULT, finish, False)
        for name in left:
            self._waiting.setdefault(name, []).append(finish)
        if not left:
            finish(True)

    def _post_end(self, ended: FetchEnded | LoadEnded) -> None:
        name = ("fetch", ended.fetch_id) if isinstance(ended, FetchEnded) else _load(ended.load_id)
        self._under_way.discard(name)
        self._post(ended)
        for on_end in self._waiting.pop(name, ()):
            on_end(not ended.error)

    def _on_read(self, fetch: _Fetch) -> None:
        if fetch.timer is None:
            return  # the transfer has ended in the meantime
        if self.gone:
            fetch.reader._end_fetch(fetch, "the source has left")
            return
        self._num_reads += 1
        read_id = f"{self._id}:{self._num_reads}"
        self._reads[read_id] = fetch
        self._post(ReadRequested(read_id=read_id, keys=tuple(fetch.action.keys)))

    def _end_read(self, read_id: str, error: str) -> None:
        fetch = self._reads.pop(read_id)
        fetch.reader._end_fetch(fetch, error)
        self._post_later(ReadEnded(read_id=read_id, error=error))

    def _end_fetch(self, fetch: _Fetch, error: str) -> None:
        """Ends a fetch at its reader, once: after the last byte, or at the timeout."""
        if fetch.timer is None:
            return
        fetch.timer.cancel()
        fetch.timer = None
        granted = 0 if error else fetch.granted
        if error:
            if fetch.flow is not None:
                fetch.flow.cancel()
            for read_id, other in list(fetch.source._reads.items()):
                if other is fetch:
                    del fetch.source._reads[read_id]
                    fetch.source._post_later(ReadEnded(read_id=read_id, error=error))
        seconds = self._clock.now - fetch.began_s
        num_bytes = granted * self._block_bytes
        figures = self.figures
        figures.num_fetches += 1
        figures.num_bytes += num_bytes
        figures.fetched_bytes += num_bytes
        figures.fetching_s += seconds
        figures.seconds += seconds
        ended = FetchEnded(
            fetch_id=fetch.action.fetch_id,
            num_blocks=granted,
            num_bytes=num_bytes,
            seconds=seconds,
            error=error,
        )
        self._clock.at(self._clock.now, Priority.TRANSFER_END, self._post_end, ended)

    # The SSD

    def store(self, action: StoreBlocks) -> None:
        assert self._links.ssd_write is not None
        began_s, num_bytes = self._clock.now, len(action.slots) * self._block_bytes

        def end(_: Flow) -> None:
            seconds = self._clock.now - began_s
            self.figures.num_stores += 1
            self.figures.stored_bytes += num_bytes
            self.figures.storing_s += seconds
            self._post(
                StoreEnded(
                    store_id=action.store_id,
                    num_blocks=len(action.slots),
                    num_bytes=num_bytes,
                    seconds=seconds,
                )
            )

        self._network.start((self._links.ssd_write,), num_bytes, end, latency_s=SSD_LATENCY_S)

    def load(self, action: LoadBlocks) -> None:
        assert self._links.ssd_read is not None
        began_s, num_bytes = self._clock.now, len(action.slots) * self._block_bytes
        by_layer = self._layer_wise and action.by_layer
        self._under_way.add(_load(action.load_id))

        def report_layers(num_layers: int) -> None:
            seconds = self._clock.now - began_s
            self._post(LoadProgress(action.load_id, num_layers, seconds))

        def end() -> None:
            seconds = self._clock.now - began_s
            self.figures.num_loads += 1
            self.figures.loaded_bytes += num_bytes
            self.figures.loading_s += seconds
            self._post_end(
                LoadEnded(
                    load_id=action.load_id,
                    num_blocks=len(action.slots),
                    num_bytes=num_bytes,
                    seconds=seconds,
                )
            )

        if by_layer:
            self._clock.after(SSD_LATENCY_S, Priority.MESSAGE, report_layers, 0)
        path = (self._links.ssd_read,)
        self._start_parts(
            path, num_bytes, SSD_LATENCY_S, lambda _: None, report_layers, end, by_layer=by_layer
        )

    def _post_later(self, event: MessengerEvent) -> None:
        self._clock.at(self._clock.now, Priority.TRANSFER_END, self._post, event)


def _load(load_id: str) -> _Name:
    return "load", load_id

"""The events of a vLLM server's prefix cache (`--kv-events-config`), over ZeroMQ.

The batches of events are numbered. The reader requests missed batches again if the server has a
replay endpoint. If a missed batch cannot be had again, the reader reports that all earlier events
are void. All input is untrusted: it is decoded to bounded, typed values or dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import msgspec

from moonpool.installation import install_command
from moonpool.types import MALFORMED
from moonpool.vllm.actions import CacheEventsReceived
from moonpool.vllm.block_names import (
    ExternalBlocksCleared,
    ExternalBlocksRemoved,
    ExternalBlocksStored,
    ForeignEvent,
    ForeignHash,
)

log = logging.getLogger("moonpool.vllm")

MAX_MESSAGE_BYTES = 64 << 20
QUEUED = 100_000  # most batches that are queued; vLLM keeps the same number
REPLAY_S = 5.0  # longest time without a message from the server
LOOK_MS, REPLAY_LOOK_MS = 2000, 250
"""How long to wait for events: normally, and when they are requested again because none arrive."""
Connection = Literal["none", "open", "refused"]
"""The state of the connection to a publisher; `refused` means that what listens there is no
publisher."""
_SEQ_BYTES = 8
_END = -1  # the sequence number that ends a replay
_MAX_TOKEN = (1 << 32) - 1

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}
_LOOSE = msgspec.msgpack.Decoder(list[Any])


def no_pyzmq() -> str:
    """Returns the text of the error if pyzmq, which reads the events, is not installed."""
    return (
        f"vLLM's KV events need pyzmq, which is not installed: {install_command('vllm')}; or leave"
        " the tcp:// address out, and moonpool estimates the cached blocks"
    )


class EventsError(Exception):
    """The events are not available; one line says why and what to do."""


def read_batch(payload: bytes) -> tuple[ForeignEvent, ...]:
    """Returns the events of one batch: [time, [event, ...], ...].

    Skips events of another format. Raises ValueError if the batch has another format.
    """
    try:
        batch = _LOOSE.decode(payload)
    except MALFORMED as error:
        raise ValueError(str(error)) from None
    if len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("the message is not a batch of events")
    events = (_read_event(_by_name(event)) for event in batch[1])
    return tuple(event for event in events if event is not None)


def _by_name(event: Any) -> dict[str, Any]:
    """Returns an event's fields by name. Newer releases name the fields, older ones only order
    them."""
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        return {}
    names = _FIELDS.get(event[0], ()) if isinstance(event[0], str) else ()
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _read_event(fields: dict[str, Any]) -> ForeignEvent | None:
    """Returns None for an event that does not concern blocks of plain prompts."""
    kind, hashes = fields.get("type"), fields.get("block_hashes")
    if kind == "AllBlocksCleared":
        return ExternalBlocksCleared()
    if not _are_hashes(hashes) or fields.get("group_idx"):
        return None  # groups other than the first have other kinds of layers
    medium = str(fields.get("medium") or "")
    if kind == "BlockRemoved":
        return ExternalBlocksRemoved(hashes=tuple(hashes), medium=medium)
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids")
    if kind != "BlockStored" or not _are_tokens(tokens):
        return None
    if parent is not None and not isinstance(parent, ForeignHash):
        return None
    apart, adapter = fields.get("extra_keys"), fields.get("lora_name")
    first = (apart[0] if isinstance(apart, list) and apart else None) or []
    if not isinstance(first, list):
        return None
    if adapter is not None or fields.get("lora_id") is not None:
        names_adapter = isinstance(adapter, str) and first[:1] == [adapter]
        if parent is None and not names_adapter:
            return None  # an older vLLM, which names no salts either
        first = first[1:] if names_adapter else []
    if first and not _is_salt(first):
        return None  # blocks with images and similar content are left out
    return ExternalBlocksStored(
        hashes=tuple(hashes),
        parent=parent,
        token_ids=tuple(tokens),
        salt=first[0] if first else None,
        adapter=adapter if isinstance(adapter, str) else "",
        medium=medium,
    )


def _is_salt(found: list[Any]) -> bool:
    return len(found) == 1 and isinstance(found[0], str)


def _are_hashes(found: Any) -> TypeGuard[list[ForeignHash]]:
    return isinstance(found, list) and all(isinstance(name, ForeignHash) for name in found)


def _are_tokens(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(t) is int and 0 <= t <= _MAX_TOKEN for t in found)


class EventReader:
    """Follows one publisher. `replay` is the replay endpoint, or "" without one."""

    def __init__(self, events: str, replay: str) -> None:
        """Raises EventsError."""
        try:
            import zmq.asyncio
            import zmq.utils.monitor
        except ImportError:
            raise EventsError(no_pyzmq()) from None
        self._zmq: Any = zmq
        self._context = zmq.asyncio.Context.instance()
        self.events, self.replay = events, replay
        self.asks_replay = False
        """Set to request events at the replay endpoint, because none come otherwise. The flag is
        reset when events come, and when that endpoint does not respond."""
        self.connection: Connection = "none"
        self.num_published = self.num_replayed = 0
        """Number of batches that came from the publisher, and that came from the replay endpoint,
        since `run` began."""
        self._post: Callable[[CacheEventsReceived], None] = lambda _: None
        self._next: int | None = None  # sequence number of the next batch
        self._last_published = -1  # sequence number of the last batch from the publisher
        self._is_replayed = False  # whether the replay endpoint responds
        for where in (events, replay):
            if where:
                self._connected(self._zmq.SUB, where).close()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to a publisher."""
        return self.connection == "open"

    async def run(self, post: Callable[[CacheEventsReceived], None]) -> None:
        """Runs until cancelled, and passes events to `post` on the loop. Raises zmq.ZMQError and
        EventsError."""
        self._post, self._next, self._last_published = post, None, -1
        self.connection, self.num_published, self.num_replayed = "none", 0, 0
        socket = self._socket(self._zmq.SUB)
        watch = asyncio.create_task(self._watch(socket.get_monitor_socket()))
        try:
            socket.connect(self.events)
            socket.subscribe(b"")
            self._is_replayed = await self._catch_up(0)
            while True:
                asks = self.asks_replay or (self._is_replayed and not self.is_open)
                if await socket.poll(REPLAY_LOOK_MS if asks else LOOK_MS):
                    self.asks_replay = False
                    self.num_published += 1
                    await self._on_frames(await socket.recv_multipart())
                elif asks:
                    self._is_replayed = await self._catch_up(self._next or 0)
                    self.asks_replay = self.asks_replay and self._is_replayed
        finally:
            watch.cancel()
            socket.disable_monitor()
            socket.close()

    async def _watch(self, monitor: Any) -> None:
        """Notes the state of the connection to the publisher."""
        zmq = self._zmq
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        while True:
            told = await zmq.utils.monitor.recv_monitor_message(monitor)
            event = told["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connection = "open"
            elif event & failures:
                self.connection = "refused"
            # a socket of another kind ends the connection at once
            elif event == zmq.EVENT_DISCONNECTED:
                self.connection = "none" if self.is_open else "refused"

    def _socket(self, kind: int) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, QUEUED)  # with a lower limit, the replay endpoint would drop batches
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        return socket

    def _connected(self, kind: int, where: str) -> Any:
        zmq, socket = self._zmq, self._socket(kind)
        try:
            socket.connect(where)
        except zmq.ZMQError as error:
            socket.close()
            raise EventsError(f"cannot follow KV events at {where}: {error}") from None
        return socket

    async def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
            return
        number = int.from_bytes(frames[-2], "big", signed=True)
        if number < 0:
            return
        due = self._next
        # A publisher counts up, so one that starts again at 0, or goes back, is a new one.
        is_new = not number or number <= self._last_published
        self._last_published = number
        if is_new and due is not None:
            self._next = None
            self._post(CacheEventsReceived((), lost=True))
            if number:
                await self._catch_up(0)
        elif due is not None and number > due:
            await self._catch_up(due)
        if self._next is not None and number < self._next:
            return  # the batch was already received from the replay endpoint
        if self._next is not None and number > self._next:
            self._post(CacheEventsReceived((), lost=True))
        self._pass_on(number, frames[-1])

    def _pass_on(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            events = read_batch(payload)
        except ValueError as error:
            log.warning("a malformed batch of KV events: %s; forgetting the cached blocks", error)
            self._post(CacheEventsReceived((), lost=True))
            return
        if events:
            self._post(CacheEventsReceived(events))

    async def _catch_up(self, first: int) -> bool:
        """Requests the batches from `first` on again, and reports any gap among them. Returns
        whether there was a reply."""
        if not self.replay:
            return False
        # because one request gets many replies
        socket = self._connected(self._zmq.DEALER, self.replay)
        try:
            await socket.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
                    return False
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number == _END:
                    return True
                if self._next is not None and number < self._next:
                    continue
                if self._next is not None and number > self._next:
                    self._post(CacheEventsReceived((), lost=True))
                self.num_replayed += 1
                self._pass_on(number, frames[-1])
        except (TimeoutError, self._zmq.ZMQError) as error:
            log.warning(
                "no replay of KV events from vLLM at %s: %s", self.replay, error or "no reply"
            )
            return False
        finally:
            socket.close()

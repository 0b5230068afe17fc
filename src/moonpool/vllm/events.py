"""What a vLLM publishes of its prefix cache (`--kv-events-config`), over ZeroMQ.

Its batches are numbered. Of those that were missed, before we came or since, it is asked to repeat
what it still has, where it listens for that; what cannot be had makes us forget what we knew.
Everything that arrives is outside data: it is decoded into bounded, typed values or dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec

from moonpool.kvcache.foreign import (
    ForeignCleared,
    ForeignEvent,
    ForeignHash,
    ForeignRemoved,
    ForeignStored,
)
from moonpool.workers.guest import NamesTold

log = logging.getLogger("moonpool.vllm")

MAX_MESSAGE_BYTES = 64 << 20
QUEUED = 100_000  # batches, as vLLM itself keeps
REPLAY_S = 5.0  # without a word from it
_SEQ_BYTES = 8
_END = -1  # as a sequence number: nothing more to repeat
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


class EventsError(Exception):
    """They cannot be had; one line says why and what to do."""


def read_batch(payload: bytes) -> tuple[ForeignEvent, ...]:
    """The events of one batch: [time, [event, ...], ...]. What has another form is left out;
    ValueError if the batch itself has."""
    try:
        batch = _LOOSE.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("it is no batch of events")
    events = (_read_event(_by_name(event)) for event in batch[1])
    return tuple(event for event in events if event is not None)


def _by_name(event: Any) -> dict[str, Any]:
    """Newer releases name an event's fields, older ones rely on their order."""
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        return {}
    names = _FIELDS.get(event[0], ()) if isinstance(event[0], str) else ()
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _read_event(fields: dict[str, Any]) -> ForeignEvent | None:
    """None: it says nothing of blocks that prompts could find."""
    kind, hashes = fields.get("type"), fields.get("block_hashes")
    if kind == "AllBlocksCleared":
        return ForeignCleared()
    if not _are_hashes(hashes) or fields.get("group_idx"):
        return None  # or it is of another kind of layers than the first
    medium = str(fields.get("medium") or "")
    if kind == "BlockRemoved":
        return ForeignRemoved(hashes=tuple(hashes), medium=medium)
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids")
    if kind != "BlockStored" or not _are_tokens(tokens):
        return None
    if parent is not None and not isinstance(parent, ForeignHash):
        return None
    if fields.get("lora_id") is not None or fields.get("lora_name") is not None:
        return None  # an adapter's blocks are not the model's
    apart = fields.get("extra_keys")
    first = apart[0] if isinstance(apart, list) and apart else None
    if first is not None and not _is_salt(first):
        return None  # images and the like
    return ForeignStored(
        hashes=tuple(hashes),
        parent=parent,
        token_ids=tuple(tokens),
        salt=None if first is None else first[0],
        medium=medium,
    )


def _is_salt(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 1 and isinstance(found[0], str)


def _are_hashes(found: Any) -> TypeGuard[list[ForeignHash]]:
    return isinstance(found, list) and all(isinstance(name, ForeignHash) for name in found)


def _are_tokens(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(t) is int and 0 <= t <= _MAX_TOKEN for t in found)


class EventReader:
    """Follows one publisher. `replay`: where it repeats, "" if nowhere."""

    def __init__(self, events: str, replay: str) -> None:
        """Raises EventsError."""
        try:
            import zmq.asyncio
        except ImportError:
            raise EventsError(
                "vLLM's KV events need pyzmq: pip install 'moonpool[vllm]', or leave the tcp://"
                " address out (what is cached there is then assumed)"
            ) from None
        self._zmq: Any = zmq
        self._context = zmq.asyncio.Context.instance()
        self._events, self._replay = events, replay
        self._tell: Callable[[NamesTold], None] = lambda told: None
        self._next: int | None = None  # number of the next batch
        for where in (events, replay):
            if where:
                self._connected(self._zmq.SUB, where).close()

    async def run(self, tell: Callable[[NamesTold], None]) -> None:
        """Until cancelled; `tell` is called on the loop. Raises zmq.ZMQError."""
        self._tell, self._next = tell, None
        socket = self._connected(self._zmq.SUB, self._events)
        try:
            socket.subscribe(b"")
            await self._catch_up(0)
            while True:
                await self._on_frames(await socket.recv_multipart())
        finally:
            socket.close()

    def _connected(self, kind: int, where: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, QUEUED)  # with less, who repeats would drop some
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.TCP_KEEPALIVE, 1)
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
        due = self._next
        if due is not None and 0 < number < due:
            return  # it was repeated already
        # A publisher that begins anew at 0 is another one.
        if due is not None and number != due and number:
            await self._catch_up(due)
        if number == 0:
            self._next = None
        if self._next is not None and number < self._next:
            return  # it came with what was repeated
        if due is not None and number != self._next:
            self._tell(NamesTold((), anew=True))
        self._pass_on(number, frames[-1])

    def _pass_on(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            events = read_batch(payload)
        except ValueError as error:
            log.warning("a batch of KV events cannot be read: %s", error)
            self._tell(NamesTold((), anew=True))
            return
        if events:
            self._tell(NamesTold(events))

    async def _catch_up(self, first: int) -> None:
        """Has the batches from `first` on repeated, as far as they can be had; of a hole among them
        we tell."""
        if not self._replay:
            return
        socket = self._connected(self._zmq.DEALER, self._replay)  # one question, many answers
        try:
            await socket.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), REPLAY_S)
                if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
                    return
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number == _END:
                    return
                if self._next is not None and number < self._next:
                    continue
                if self._next is not None and number > self._next:
                    self._tell(NamesTold((), anew=True))
                self._pass_on(number, frames[-1])
        except (TimeoutError, self._zmq.ZMQError) as error:
            log.warning("vLLM at %s repeats no KV events: %s", self._replay, error or "no answer")
        finally:
            socket.close()

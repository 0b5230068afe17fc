"""The memory that an instance keeps beside its attention workers: one more place for its blocks,
served in its own process. To the rest it is an attention worker like the others.

Nothing is attended before its answer is asked for: by then the others have what they need, and work
at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moonpool.attention.client import AttentionError, Wanted
from moonpool.attention.control import Attach, Attached, Order, Received, Told
from moonpool.attention.hand import Hand
from moonpool.attention.keeper import AttachError, Keeper
from moonpool.attention.port import Payload, PortError, view_of
from moonpool.attention.wire import Header
from moonpool.kvcache.transfers import (
    FetchEnded,
    MessengerEvent,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.messenger.arena import ArenaError


class HomePort:
    """Both ends in one: what is sent is served when an answer is asked for. Used by one thread."""

    transport = "home"
    patience_s: float | None = None

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._asked: deque[tuple[Header, tuple[Payload, ...]]] = deque()
        self._answers: deque[tuple[Header, tuple[Payload, ...]]] = deque()
        self._parts: deque[Payload] = deque()  # of the answer that is being taken
        self._closed = False

    def send(self, header: Header, *payload: Payload) -> None:
        if self._closed:
            raise PortError("it is closed")
        self._asked.append((header, payload))

    def receive(self, target: Payload | None = None) -> Header:
        while not self._answers:
            if self._closed or not self._asked:
                raise PortError("it was asked for nothing")
            header, payload = self._asked.popleft()
            self._hand.take(_Inside(payload, self._answers), header)
        header, parts = self._answers.popleft()
        self._parts = deque(parts)
        if target is not None and view_of(target).nbytes == header.num_bytes:
            self.receive_into(target)
        return header

    def receive_into(self, target: Payload) -> None:
        to = view_of(target)
        while len(to):
            if not self._parts:
                raise PortError("it answered less than was asked")
            part = view_of(self._parts.popleft())
            count = min(len(to), len(part))
            to[:count], to = part[:count], to[count:]
            if count < len(part):
                self._parts.appendleft(part[count:])

    def close(self) -> None:
        self._closed = True


class _Inside:
    """What the hand sees of it: one message, and where answers go."""

    transport = "home"
    patience_s: float | None = None

    def __init__(
        self, payload: tuple[Payload, ...], answers: deque[tuple[Header, tuple[Payload, ...]]]
    ) -> None:
        self._payload = deque(payload)
        self._answers = answers

    def send(self, header: Header, *payload: Payload) -> None:
        self._answers.append((header, payload))

    def receive(self, target: Payload | None = None) -> Header:
        raise PortError("one message at a time")

    def receive_into(self, target: Payload) -> None:
        view_of(target)[:] = view_of(self._payload.popleft())

    def close(self) -> None:
        """Nothing is open."""


class HomeClient:
    """What `attention.client.AttentionClient` is to a worker elsewhere. Made by `keep_at_home`."""

    def __init__(self, keeper: Keeper, hand: Hand, attached: Attached) -> None:
        self.port = HomePort(hand)
        self.attached = attached
        self._keeper = keeper
        self._on_told: Callable[[Told], None] = lambda told: None

    def order(self, order: Order) -> None:
        self._keeper.perform(order)
        self._on_told(Received(num_bytes=self._keeper.received_bytes()))

    def listen(self, on_told: Callable[[Told], None], on_lost: Callable[[str], None]) -> None:
        """It is lost with its instance only."""
        self._on_told = on_told

    def tell(self, event: MessengerEvent) -> None:
        """Nothing happens before something is ordered, and so after `listen`."""
        if isinstance(event, FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded):
            self._on_told(event)

    def close(self) -> None:
        self.port.close()
        self._keeper.close()


def keep_at_home(keeper: Keeper, wanted: Wanted) -> HomeClient:
    """Raises AttentionError."""
    attach = Attach(
        owner=wanted.owner,
        layout=wanted.layout,
        num_heads=wanted.heads,
        kv_heads=wanted.kv_heads,
        scale=wanted.scale,
        num_blocks=wanted.num_blocks,
        threads=wanted.threads,
        token="",
        ring_bytes=wanted.ring_bytes,
    )
    told: list[HomeClient] = []
    try:
        attached = keeper.attach(attach, lambda event: told[0].tell(event))
    except (AttachError, ArenaError, OSError) as error:
        raise AttentionError(f"the instance's own memory: {error}") from error
    hand = keeper.hand()
    assert hand is not None
    told.append(HomeClient(keeper, hand, attached))
    return told[0]

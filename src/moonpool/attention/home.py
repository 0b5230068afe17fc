"""The memory that an instance keeps beside its attention workers: one more place for its blocks.

What moves blocks takes it for an attention worker like the others; its steps need no messages.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.attention.client import AttentionError, Wanted
from moonpool.attention.control import Attached, Order, Received, Told
from moonpool.attention.hand import Hand
from moonpool.attention.keeper import AttachError, Keeper
from moonpool.kvcache.transfers import (
    FetchEnded,
    MessengerEvent,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.messenger.arena import ArenaError


class HomeClient:
    """What `attention.client.AttentionClient` is to a worker elsewhere. Made by `keep_at_home`."""

    def __init__(self, keeper: Keeper, hand: Hand, attached: Attached) -> None:
        self.hand = hand
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
        self._keeper.close()


def keep_at_home(keeper: Keeper, wanted: Wanted) -> HomeClient:
    """Raises AttentionError."""
    told: list[HomeClient] = []
    try:
        attached = keeper.attach(wanted.attach(""), lambda event: told[0].tell(event))
    except (AttachError, ArenaError, OSError) as error:
        raise AttentionError(f"the instance's own memory: {error}") from error
    hand = keeper.hand()
    assert hand is not None
    told.append(HomeClient(keeper, hand, attached))
    return told[0]

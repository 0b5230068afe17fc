"""A model whose blocks a pool has, and the connections of its users."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from moonpool.host_pool.block_space import Finder
from moonpool.host_pool.messages import PoolMessage, framed
from moonpool.host_pool.pool_group import BlockGroup
from moonpool_engine.host_pool.space_host import SpaceHost

log = logging.getLogger("moonpool.pool")

MAX_UNSENT_BYTES = 256 << 20


@dataclass(slots=True)
class PooledModel:
    """A model. `lock` is held while a space is being opened."""

    name: str
    model: str
    block_tokens: int
    state: BlockGroup
    hosts: dict[int, SpaceHost] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    clients: set[ClientConnection] = field(default_factory=set)
    watchers: set[ClientConnection] = field(default_factory=set)
    fetches: dict[str, GroupFetch] = field(default_factory=dict)
    used: int = 0
    num_attaching: int = 0
    """Clients whose space is being opened."""
    is_closed: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses the model, so that it may give way to another model."""
        return not (self.clients or self.num_attaching or self.fetches or self.state.num_finds)


@dataclass(slots=True)
class GroupFetch:
    """A fetch of blocks from another host. `left`: ranks that have not ended their part."""

    client: ClientConnection
    number: int
    left: set[int]
    num_keys: int
    num_blocks: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class PromptFind:
    """A client's search; `places`: whether the client wants to know where the blocks lie."""

    group: PooledModel
    places: bool


class ClientConnection:
    """One connection."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.name = f"client {number}"
        self.space: tuple[PooledModel, int] | None = None
        self.finds: dict[Finder, PromptFind] = {}
        self.reservations: dict[int, int] = {}
        self._writer = writer

    def send(self, message: PoolMessage) -> None:
        """A client that does not read is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(framed(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("%s does not read its answers; its connection ends", self.name)
            self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

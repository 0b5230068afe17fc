"""The pool of a host: serves the clients of all models over a unix socket.

Only processes of the same user may connect. When a client disconnects, its holds end. A model
without clients keeps its blocks until another model needs its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import numpy as np

from moonpool import __version__
from moonpool.host_pool.block_space import BlocksFetched, BlocksFound, Finder
from moonpool.host_pool.messages import (
    PROTOCOL,
    TO_POOL,
    AttachRank,
    ClientMessage,
    Commit,
    Damaged,
    Describe,
    Fetched,
    FetchToPool,
    Find,
    Found,
    GroupBlocks,
    GroupState,
    JoinPool,
    PoolJoinAccepted,
    PoolRefused,
    PoolState,
    RankAttached,
    Release,
    Reserve,
    Reserved,
    Waiting,
    Watch,
    is_own_user,
    keys_of,
    read_message,
)
from moonpool.host_pool.places import is_served, make_own_folder
from moonpool.host_pool.pool_group import GroupFound
from moonpool.types import MALFORMED
from moonpool_engine.host_pool.pooled_model import (
    ClientConnection,
    GroupFetch,
    PooledModel,
    PromptFind,
)
from moonpool_engine.host_pool.pooled_models import HostPoolPlace, PooledModels
from moonpool_engine.host_pool.space_host import SpaceError

log = logging.getLogger("moonpool.pool")

TICK_S = 0.01
WAITING_S = 0.1
"""How often a client is told that its find still waits; a client that hears nothing gives up."""
FIRST_S = 10.0
"""How long a client may take for its first message."""
MAX_CLIENTS = 256
MAX_FINDS = 4096
MAX_RESERVATIONS = 256
MAX_FETCHES = 1024


class PoolServer:
    """`run` serves until it is cancelled. Raises OSError if the socket cannot be opened."""

    def __init__(self, place: HostPoolPlace) -> None:
        self._place = place
        self._models = PooledModels(place, self._perform)
        self._clients: set[ClientConnection] = set()
        self._num_clients = self._num_reservations = self._num_fetches = 0

    async def run(self) -> None:
        path = self._place.socket_path
        server = await asyncio.start_unix_server(self._serve, sock=_listen(path))
        log.info("the pool serves at %s", path)
        ticks = asyncio.create_task(self._tick())
        try:
            await asyncio.Event().wait()
        finally:
            ticks.cancel()
            server.close()
            for client in list(self._clients):
                client.close()
            await self._models.close()
            path.unlink(missing_ok=True)

    async def _tick(self) -> None:
        said_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            finding = [one for one in self._models.by_key.values() if one.state.num_finds]
            for group in finding:
                group.state.on_time(time.monotonic())
                self._perform(group)
            if finding and time.monotonic() - said_s >= WAITING_S:
                said_s = time.monotonic()
                self._say_waiting()

    def _say_waiting(self) -> None:
        for client in self._clients:
            for owner, find in client.finds.items():
                if find.group.state.is_finding(owner):
                    client.send(Waiting(owner=owner.name))

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_clients += 1
        client = ClientConnection(self._num_clients, writer)
        try:
            problem = self._stranger(writer)
            if problem:
                client.send(PoolRefused(error=problem))
                return
            self._clients.add(client)
            async with asyncio.timeout(FIRST_S):
                message = await read_message(reader, TO_POOL)
            if not await self._greet(client, message):
                return
            while True:
                self._on_message(client, await read_message(reader, TO_POOL))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except (*MALFORMED, ValueError) as error:
            log.warning("%s sent what this pool does not understand: %s", client.name, error)
            client.send(PoolRefused(error=f"this pool does not understand the message: {error}"))
        finally:
            self._forget(client)
            client.close()

    def _stranger(self, writer: asyncio.StreamWriter) -> str:
        """Returns why this peer is not served, or "" if it is."""
        if not is_own_user(writer.get_extra_info("socket")):
            log.warning("a process of another user asked for the pool and was refused")
            return "the pool belongs to another user"
        if len(self._clients) >= MAX_CLIENTS:
            return f"the pool has {MAX_CLIENTS} clients already"
        return ""

    async def _greet(self, client: ClientConnection, message: ClientMessage) -> bool:
        if not isinstance(message, AttachRank | JoinPool):
            client.send(PoolRefused(error="the first message is to attach or to join"))
            return False
        if message.protocol != PROTOCOL:
            text = f"the pool speaks protocol {PROTOCOL}, this client {message.protocol}:"
            client.send(
                PoolRefused(error=f"{text} install the same version of moonpool on both sides")
            )
            return False
        if isinstance(message, JoinPool):
            client.send(PoolJoinAccepted(version=__version__))
            return True
        try:
            group, host = await self._models.attach(message)
        except SpaceError as error:
            log.warning("%s rank %d is not served: %s", message.model, message.rank, error)
            client.send(PoolRefused(error=str(error)))
            return False
        client.name = f"{group.name} rank {message.rank}"
        client.space = group, message.rank
        group.clients.add(client)
        client.send(RankAttached(path=host.path, num_blocks=host.num_blocks))
        return True

    def _forget(self, client: ClientConnection) -> None:
        """Gives back all that a client held."""
        self._clients.discard(client)
        for group in self._models.by_key.values():
            group.clients.discard(client)
            group.watchers.discard(client)
        for owner, find in client.finds.items():
            find.group.state.release(owner)
            self._perform(find.group)
        if client.space is not None:
            group, rank = client.space
            for number in client.reservations.values():
                group.hosts[rank].space.abandon(number)
            self._perform(group)

    # Messages

    def _on_message(self, client: ClientConnection, message: ClientMessage) -> None:
        """Raises ValueError for a message that this client may not send now."""
        match message:
            case Find():
                self._on_find(client, message)
            case Release():
                owner = Finder(client.number, message.owner)
                find = client.finds.pop(owner, None)
                if find is not None:
                    find.group.state.release(owner)
                    self._perform(find.group)
            case Reserve():
                self._on_reserve(client, message)
            case Commit():
                self._on_commit(client, message)
            case Damaged():
                group, rank = _space(client)
                host = group.hosts[rank]
                log.warning("%s: %d blocks in memory are damaged", client.name, len(message.keys))
                host.space.drop(keys_of(message.keys))
                self._perform(group)
            case Watch():
                self._on_watch(client, message)
            case FetchToPool():
                self._on_fetch(client, message)
            case Describe():
                client.send(self._state())
            case _:
                raise ValueError("this client has attached already")

    def _on_find(self, client: ClientConnection, message: Find) -> None:
        group = self._models.by_key.get(message.group)
        if group is None or len(client.finds) >= MAX_FINDS:
            client.send(Found(owner=message.owner, num_blocks=0))
            return
        self._models.use(group)
        owner = Finder(client.number, message.owner)
        client.finds[owner] = PromptFind(group, message.places)
        until_s = time.monotonic() + message.wait_s
        group.state.find(owner, keys_of(message.keys), until_s)
        self._perform(group)
        if group.state.is_finding(owner):
            client.send(Waiting(owner=message.owner))

    def _on_reserve(self, client: ClientConnection, message: Reserve) -> None:
        group, rank = _space(client)
        if message.number in client.reservations or len(client.reservations) >= MAX_RESERVATIONS:
            raise ValueError(f"the reservation {message.number} is one too many")
        self._num_reservations += 1
        client.reservations[message.number] = self._num_reservations
        host = group.hosts[rank]
        keys = keys_of(message.keys)
        places = host.reserve(self._num_reservations, keys, message.first_depth)
        self._perform(group)
        ids = np.array([-1 if place is None else place for place in places], "<i8").tobytes()
        client.send(Reserved(number=message.number, block_ids=ids))

    def _on_commit(self, client: ClientConnection, message: Commit) -> None:
        group, rank = _space(client)
        number = client.reservations.pop(message.number, None)
        if number is None:
            raise ValueError(f"there is no reservation {message.number}")
        if not group.hosts[rank].commit(number, message.checksums):
            raise ValueError("a commit states one checksum for each slice")
        group.state.on_blocks()
        self._perform(group)

    def _on_watch(self, client: ClientConnection, message: Watch) -> None:
        group = self._models.by_key.get(message.group)
        if group is None or not group.state.is_whole:
            raise ValueError("the pool has no such model")
        self._perform(group)
        group.watchers.add(client)
        space = group.hosts[group.state.first_whole_rank].space
        client.send(GroupBlocks(group=message.group, report=space.snapshot()))

    def _on_fetch(self, client: ClientConnection, message: FetchToPool) -> None:
        group = self._models.by_key.get(message.group)
        if (
            group is None
            or len(group.fetches) >= MAX_FETCHES
            or len(message.sources) != len(group.hosts)
            or not group.state.is_whole
        ):
            error = "the pool has no such model with as many ranks, or too many fetches"
            client.send(Fetched(number=message.number, num_blocks=0, error=error))
            return
        self._models.use(group)
        self._num_fetches += 1
        fetch_id = f"{client.number}:{message.number}:{self._num_fetches}"
        ranks = set(group.hosts)
        group.fetches[fetch_id] = GroupFetch(
            client, message.number, ranks, len(message.keys), len(message.keys)
        )
        keys = keys_of(message.keys)
        for rank, host in group.hosts.items():
            part = group.state.part_of(rank, keys)
            depth = len(keys) - len(part)
            host.space.fetch(fetch_id, message.sources[rank], part, message.timeout_s, depth)
        self._perform(group)

    # Answers

    def _perform(self, group: PooledModel) -> None:
        """Performs what the spaces of a group want, until they want nothing more."""
        now = time.monotonic()
        told = group.state.first_whole_rank
        has_more = not group.is_closed
        while has_more:
            has_more = False
            for rank, host in group.hosts.items():
                ended, changes = host.perform()
                for one in ended:
                    has_more = True
                    if isinstance(one, BlocksFound):
                        group.state.on_found(rank, one, now)
                    else:
                        self._on_fetched(group, rank, one)
                if changes is not None and rank == told and group.watchers:
                    key = next(key for key, one in self._models.by_key.items() if one is group)
                    for watcher in list(group.watchers):
                        watcher.send(GroupBlocks(group=key, report=changes))
            for found in group.state.take():
                self._answer(group, found)

    def _answer(self, group: PooledModel, found: GroupFound) -> None:
        number, name = found.owner
        client = next((one for one in self._clients if one.number == number), None)
        if client is None:
            group.state.release(found.owner)
            return
        ranks = found.block_ids if client.finds[found.owner].places else ()
        places = tuple(group.hosts[rank].places(ids) for rank, ids in enumerate(ranks))
        client.send(
            Found(
                owner=name, num_blocks=found.num_blocks, num_loaded=found.num_loaded, ranks=places
            )
        )

    def _on_fetched(self, group: PooledModel, rank: int, ended: BlocksFetched) -> None:
        fetch = group.fetches[ended.fetch_id]
        fetch.left.discard(rank)
        num_blocks = group.state.reached(rank, fetch.num_keys, ended.num_blocks)
        fetch.num_blocks = min(fetch.num_blocks, num_blocks)
        fetch.num_bytes += ended.num_bytes
        fetch.seconds = max(fetch.seconds, ended.seconds)
        fetch.error = fetch.error or ended.error
        if fetch.left:
            return
        del group.fetches[ended.fetch_id]
        fetch.client.send(
            Fetched(
                number=fetch.number,
                num_blocks=fetch.num_blocks,
                num_bytes=fetch.num_bytes,
                seconds=fetch.seconds,
                error=fetch.error,
            )
        )
        group.state.on_blocks()

    def _state(self) -> PoolState:
        groups = tuple(
            GroupState(
                group=key,
                model=group.model,
                block_tokens=group.block_tokens,
                num_ranks=group.state.num_ranks,
                num_clients=len(group.clients),
                is_whole=group.state.is_whole,
                spaces=tuple(host.state(rank) for rank, host in sorted(group.hosts.items())),
            )
            for key, group in sorted(self._models.by_key.items(), key=lambda one: one[1].used)
        )
        return PoolState(
            version=__version__,
            pid=os.getpid(),
            dram_bytes=self._place.dram_bytes,
            groups=groups,
        )


def _listen(path: Path) -> socket.socket:
    """Listens at `path`, which only the user of this process can reach. Raises OSError."""
    make_own_folder(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not is_served(path):
            path.unlink()
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(64)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _space(client: ClientConnection) -> tuple[PooledModel, int]:
    """Returns the client's space. Raises ValueError if the client has none."""
    if client.space is None:
        raise ValueError("this client has no space: it joined without attaching")
    return client.space

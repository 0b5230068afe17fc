"""Connects an instance whose engine is vLLM with the pool of its host, if that vLLM uses it.

The pool is found by its unix socket, so only for a vLLM on this machine. A group of the pool is
this vLLM's if its model and block size are. The pool may come and go; without it, nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from moonpool.host_pool.messages import (
    FROM_POOL,
    PROTOCOL,
    ClientMessage,
    Describe,
    Fetched,
    FetchToPool,
    Find,
    Found,
    GroupBlocks,
    GroupState,
    JoinPool,
    PoolJoinAccepted,
    PoolMessage,
    PoolRefused,
    PoolState,
    Release,
    Watch,
    framed,
    is_own_user,
    read_message,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import MALFORMED
from moonpool.vllm.actions import AwaitPool, PoolChanged, PoolJoined, PoolLost, PoolReady

log = logging.getLogger("moonpool.vllm")

LOOK_S = 2.0
CONNECT_S = 5.0
STORE_WAIT_S = 1.0
"""How long a prefill waits until its last blocks are in the pool."""
FETCH_S = 10.0
MARGIN_S = 2.0

PoolEvent = PoolJoined | PoolChanged | PoolLost | PoolReady


class PoolWatch:
    """Watches the pool for one vLLM. `post` receives what the state machine must know; `on_rates`
    receives the bytes of a block and the read rate of the pool's SSD."""

    def __init__(
        self,
        path: Path,
        model: str,
        block_tokens: int,
        post: Callable[[PoolEvent], None],
        on_rates: Callable[[int, float], None],
    ) -> None:
        self._path = path
        self._model = model
        self._block_tokens = block_tokens
        self._post = post
        self._on_rates = on_rates
        self._writer: asyncio.StreamWriter | None = None
        self._group: GroupState | None = None
        self._answers: dict[str, asyncio.Future[Found | Fetched]] = {}
        self._number = 0
        self._said = ""
        self._has_group = asyncio.Event()

    @property
    def address(self) -> PeerAddress | None:
        """Returns the address at which the pools of other hosts read this one's blocks, or None
        without a pool."""
        return None if self._group is None else _address_of(self._group)

    async def settled(self, timeout_s: float) -> None:
        """Returns when the pool has been found, or at the end of this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_group.wait()

    async def run(self) -> None:
        """Looks for the pool and follows it, until it is cancelled."""
        while True:
            try:
                await self._follow()
                problem = "the pool ended the connection"
            except TimeoutError:
                problem = "the pool does not answer"
            except (OSError, ValueError, asyncio.IncompleteReadError, *MALFORMED) as error:
                problem = str(error) or type(error).__name__
            finally:
                self._end()
            if problem != self._said:
                self._said = problem
                log.debug("no KVCache pool at %s: %s", self._path, problem)
            await asyncio.sleep(LOOK_S)

    def _end(self) -> None:
        had_group, self._group, self._writer = self._group is not None, None, None
        for future in self._answers.values():
            if not future.done():
                future.cancel()
        self._answers.clear()
        if had_group:
            log.warning("the KVCache pool at %s is gone; prompts are computed", self._path)
            self._post(PoolLost())

    async def _follow(self) -> None:
        """Serves one connection. Raises ValueError and what sockets raise."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            if not is_own_user(writer.get_extra_info("socket")):
                raise ValueError("its socket is another user's")
            self._writer = writer
            self._send(JoinPool(protocol=PROTOCOL))
            async with asyncio.timeout(CONNECT_S):
                hello = await read_message(reader, FROM_POOL)
            if isinstance(hello, PoolRefused):
                raise ValueError(hello.error)
            if not isinstance(hello, PoolJoinAccepted):
                raise ValueError("it answered with something else than a welcome")
            looks = asyncio.create_task(self._look())
            try:
                while True:
                    self._on_message(await read_message(reader, FROM_POOL))
            finally:
                looks.cancel()
        finally:
            writer.close()

    async def _look(self) -> None:
        """Requests the pool's groups, until this vLLM has one."""
        while self._group is None:
            self._send(Describe())
            await asyncio.sleep(LOOK_S)

    def _send(self, message: ClientMessage) -> None:
        if self._writer is not None:
            self._writer.write(framed(message))

    def _on_message(self, message: PoolMessage) -> None:
        match message:
            case PoolState():
                self._choose(message)
            case GroupBlocks():
                self._post(PoolChanged(message.report))
            case Found():
                self._answer(message.owner, message)
            case Fetched():
                self._answer(str(message.number), message)
            case PoolRefused():
                raise ValueError(message.error)
            case _:
                pass

    def _answer(self, name: str, message: Found | Fetched) -> None:
        future = self._answers.pop(name, None)
        if future is not None and not future.done():
            future.set_result(message)

    def _choose(self, state: PoolState) -> None:
        """Takes the group of this vLLM, if there is exactly one."""
        fitting = [
            group
            for group in state.groups
            if group.model == self._model
            and group.block_tokens == self._block_tokens
            and group.is_whole
            and group.num_clients
        ]
        if self._group is not None or not fitting:
            return
        if len(fitting) > 1:
            text = "the pool has %d layouts of %s: it is not known which one this vLLM has"
            log.warning(text, len(fitting), self._model)
            return
        self._group = fitting[0]
        log.info("the KVCache pool at %s has the blocks of %s", self._path, self._model)
        self._has_group.set()
        self.tell()

    def tell(self) -> None:
        """Tells the state machine about the pool, if there is one. Called when the pool is found,
        and when the state machine is made."""
        group = self._group
        if group is None:
            return
        self._post(PoolJoined(_address_of(group)))
        block_bytes = sum(one.block_bytes for one in group.spaces)
        self._on_rates(block_bytes, group.spaces[0].ssd_read_bytes_per_s)
        self._send(Watch(group=group.group))

    # Methods that requests wait for

    async def perform(self, wait: AwaitPool) -> None:
        """Waits for the blocks of `wait`, and posts `PoolReady` in any case: with 0 blocks if there
        is no pool, or none came in time."""
        num_blocks = 0
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            num_blocks = await self._wait(wait)
        self._post(PoolReady(wait.attempt_id, num_blocks))

    async def _wait(self, wait: AwaitPool) -> int:
        group = self._group
        if group is None:
            return 0
        self._number += 1
        if wait.source is not None and wait.source != _address_of(group):
            fetch = FetchToPool(
                number=self._number,
                group=group.group,
                sources=wait.source.spaces,
                keys=wait.keys,
                timeout_s=FETCH_S,
            )
            answer = await self._ask(str(self._number), fetch, FETCH_S + MARGIN_S)
            if isinstance(answer, Fetched) and answer.error:
                log.warning("blocks of another host's pool did not come: %s", answer.error)
            return answer.num_blocks
        owner = f"await {self._number}"
        find = Find(
            owner=owner, group=group.group, keys=wait.keys, places=False, wait_s=STORE_WAIT_S
        )
        answer = await self._ask(owner, find, STORE_WAIT_S + MARGIN_S)
        self._send(Release(owner=owner, group=group.group))
        return answer.num_blocks

    async def _ask(self, name: str, message: ClientMessage, timeout_s: float) -> Found | Fetched:
        """Raises TimeoutError, or CancelledError if the pool is gone."""
        future: asyncio.Future[Found | Fetched] = asyncio.get_running_loop().create_future()
        self._answers[name] = future
        self._send(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._answers.pop(name, None)


def _address_of(group: GroupState) -> PeerAddress:
    """Returns where others read the group's blocks: the address of the first rank's space, with all
    further ones."""
    return PeerAddress.of_spaces([space.address for space in group.spaces])

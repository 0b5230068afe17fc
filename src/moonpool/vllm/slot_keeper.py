"""Puts requests in the slots of one server, and has slots saved and restored.

Whatever goes wrong with a file is a miss: the request is computed without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field

import msgspec

from moonpool.log_limit import limited_logger
from moonpool.protocol.messages import AttemptSpec
from moonpool.types import MALFORMED
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialects.server_dialect import SlotUse
from moonpool.vllm.slot_folder import SlotFolder
from moonpool.vllm.slot_table import Held, Prompt, SlotPlan, SlotTable, held_by

log = limited_logger("moonpool.vllm")

QUIET_S = 1.0
"""Slots are saved after this long without a request: a server that saves computes nothing."""
ACTION_S = 120.0
"""A save or restore that takes longer is given up."""


class _Saved(msgspec.Struct):
    n_saved: int
    n_written: int


class _Restored(msgspec.Struct):
    n_restored: int


_SAVED = msgspec.json.Decoder(_Saved)
_RESTORED = msgspec.json.Decoder(_Restored)


class SlotError(Exception):
    """A slot was not saved or not restored; one clause says why."""


@dataclass(slots=True)
class SlotGrant:
    """A slot that is one request's. `note` receives the outputs of the request: the first one tells
    that the whole prompt is in the slot."""

    use: SlotUse
    generated: list[int] = field(default_factory=list)
    is_known: bool = False

    def note(self, work: AttemptSpec, output: EngineOutput) -> None:
        self.is_known = self.is_known or bool(output.tokens)
        if work.call is None:
            self.generated += [token.token_id for token in output.tokens]


class SlotKeeper:
    """`counters` count the keeper's operations. `on_change` is called when the table may have
    changed."""

    def __init__(self, client: VllmClient, table: SlotTable, num_slots: int) -> None:
        self._client = client
        self._table = table
        self._free = asyncio.Semaphore(num_slots)
        self._num_slots = num_slots
        self._folder: SlotFolder | None = None
        self._identities: Mapping[str, bytes] = {}
        self.counters: dict[str, float] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._quiet: asyncio.Task[None] | None = None

    def open(self, folder: SlotFolder, identities: Mapping[str, bytes], files: list[Held]) -> None:
        """Saves slots from now on. `identities`: the identities of the model and of each adapter by
        its name, "" for the model alone. `files`: the files in the folder that belong to them."""
        self._folder, self._identities = folder, identities
        self._table.saves = True
        for file in files:
            self._table.add_file(file)
        self.on_change()

    def close(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()

    def identity(self, adapter: str) -> bytes:
        return self._identities.get(adapter, b"")

    @contextlib.asynccontextmanager
    async def hold(self, prompt: Prompt) -> AsyncIterator[SlotGrant]:
        """Waits for a free slot for one request, and yields it with as much of the prompt as is
        stored."""
        if self._quiet is not None:
            self._quiet.cancel()
        async with self._free:
            plan = self._table.begin(prompt)
            assert plan is not None  # there is one plan for each permit
            grant = SlotGrant(SlotUse(plan.slot, plan.reuses))
            held: Held | None = None
            try:
                if plan.save is not None:
                    await self._try(self._save(plan.slot, plan.save), "saved")
                if plan.restore is not None and not await self._restore(plan.slot, plan.restore):
                    grant.use.reuses = self._table.has_one_root
                yield grant
                self._compare(plan, grant)
            finally:
                if grant.is_known:
                    held = held_by(prompt, self._table.block_tokens, grant.generated)
                self._table.end(plan.slot, held)
                self.on_change()
        self._await_quiet()

    def _compare(self, plan: SlotPlan, grant: SlotGrant) -> None:
        """A server that has lost what a slot should hold was restarted, or has other clients, so
        the content of its other slots is unknown."""
        found = grant.use.found_tokens
        if found is None or 2 * found >= plan.expected_tokens - self._table.block_tokens:
            return
        log.info(
            "%s found %d of %d tokens in a slot: what its others hold is not known any more",
            self._client.url,
            found,
            plan.expected_tokens,
        )
        self._count("slots_lost")
        self._table.forget_slots()

    def _await_quiet(self) -> None:
        if self._folder is not None and self._table.is_idle:
            if self._quiet is not None:
                self._quiet.cancel()
            self._quiet = asyncio.create_task(self._save_all())

    async def _save_all(self) -> None:
        """Saves slots that are worth saving while no request comes. A save that has begun
        continues, and the next request takes another slot or waits."""
        await asyncio.sleep(QUIET_S)
        await self._look_at_folder()
        while (found := self._table.unsaved()) is not None:
            number, held = found
            if not await asyncio.shield(asyncio.create_task(self._save_idle(number, held))):
                return

    async def _look_at_folder(self) -> None:
        """Takes over the changes of the folder, which another server may share."""
        assert self._folder is not None
        if not self._folder.has_changed():
            return
        found = await asyncio.to_thread(self._folder.scan, frozenset(self._identities.values()))
        for name in self._table.files.keys() - {file.name for file in found}:
            self._table.drop_file(name)
        for file in found:
            self._table.add_file(file)
        self.on_change()

    async def _save_idle(self, number: int, held: Held) -> bool:
        async with self._free:
            if self._table.unsaved() != (number, held):
                return True
            self._table.lock(number)
            is_saved = False
            try:
                is_saved = await self._try(self._save(number, held), "saved")
            finally:
                self._table.end(number, held if is_saved else None)
        return is_saved

    # The server and its folder

    async def _save(self, number: int, held: Held) -> None:
        """Raises SlotError and VllmError."""
        assert self._folder is not None
        raw = await self._act(number, "save", self._folder.file_name(held.name))
        try:
            saved = _SAVED.decode(raw)
        except MALFORMED:
            raise SlotError("the server's answer is not understood") from None
        if saved.n_saved < held.num_tokens:
            await asyncio.to_thread(self._folder.remove, held.name)
            raise SlotError(
                f"the slot had {saved.n_saved} tokens in place of {held.num_tokens}: the server"
                " moves idle slots to its own memory (--cache-ram 0 ends that), or has other"
                " clients"
            )
        if not await asyncio.to_thread(self._folder.admit, held, saved.n_written):
            raise SlotError("its file cannot be read here, or has another client's tokens")
        needless = self._table.add_file(Held(held.root, held.keys, held.num_tokens, held.name))
        self._count("slots_saved")
        for name in needless:
            await asyncio.to_thread(self._folder.remove, name)
        for name in await asyncio.to_thread(self._folder.bound):
            self._table.drop_file(name)

    async def _restore(self, number: int, file: Held) -> bool:
        self._table.put(number, None)
        if await self._try(self._restored(number, file), "restored"):
            self._table.put(number, file)
            return True
        self._table.drop_file(file.name)
        return False

    async def _restored(self, number: int, file: Held) -> None:
        """Raises SlotError and VllmError."""
        assert self._folder is not None
        if not await asyncio.to_thread(self._folder.is_intact, file):
            raise SlotError("its file is damaged or gone")
        raw = await self._act(number, "restore", self._folder.file_name(file.name))
        try:
            restored = _RESTORED.decode(raw).n_restored
        except MALFORMED:
            restored = 0
        if restored < file.num_tokens:
            await asyncio.to_thread(self._folder.remove, file.name)
            await self._act(number, "erase")
            raise SlotError(f"its file has {restored} tokens in place of {file.num_tokens}")
        self._count("slots_restored")

    async def _act(self, number: int, action: str, filename: str = "") -> bytes:
        fields = {"filename": filename} if filename else {}
        path = f"/slots/{number}?action={action}"
        return await self._client.post(path, fields, timeout_s=ACTION_S)

    async def _try(self, work: Coroutine[None, None, None], what: str) -> bool:
        """Whether the action succeeded. A failure is reported to the operator, and to no client."""
        try:
            await work
        except (SlotError, VllmError) as error:
            self._count(f"slots_not_{what}")
            log.warning("%s: a slot was not %s: %s", self._client.url, what, error)
            return False
        return True

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + 1

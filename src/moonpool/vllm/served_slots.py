"""The slots of one server for its worker: a slot for each request, and the folder in which they are
saved, once it is proven to be the server's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from moonpool.log_limit import limited_logger
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import AttemptSpec
from moonpool.types import BlockKey
from moonpool.vllm.actions import SlotsChanged
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialects.llama_server import LlamaDialect, next_logprobs
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.slot_folder import SlotFolder, SlotFolderError
from moonpool.vllm.slot_identity import PROMPT, TOP, identity_of, weights_digest, with_adapter
from moonpool.vllm.slot_keeper import SlotError, SlotGrant, SlotKeeper
from moonpool.vllm.slot_table import Prompt, SlotTable

log = limited_logger("moonpool.vllm")


class ServedSlots:
    """`post` is called when the slots have changed."""

    def __init__(
        self,
        client: VllmClient,
        facts: VllmFacts,
        layout_fingerprint: bytes,
        post: Callable[[SlotsChanged], None],
    ) -> None:
        self.client = client
        self.table = SlotTable(facts.num_slots, facts.block_tokens)
        self.keeper = SlotKeeper(client, self.table, facts.num_slots)
        self.keeper.on_change = lambda: post(SlotsChanged(dict(self.keeper.counters)))
        self._fingerprint = layout_fingerprint

    def hold(self, work: AttemptSpec) -> AbstractAsyncContextManager[SlotGrant]:
        root = root_key(self._fingerprint, work.tenant, work.adapter)
        keys: tuple[BlockKey, ...] = ()
        if work.use_cache:
            keys = tuple(block_keys(work.token_ids, self.table.block_tokens, root))
        is_exact = work.call is None or work.call.is_exact
        identity = self.keeper.identity(work.adapter) if is_exact and keys else b""
        return self.keeper.hold(Prompt(tuple(work.token_ids), root, keys, identity))

    def close(self) -> None:
        self.keeper.close()


async def open_slots(
    slots: ServedSlots, dialect: ServerDialect, facts: VllmFacts, path: str
) -> None:
    """Has slots saved in the folder from now on. Opening takes as long as reading all weights.
    Raises SlotError."""
    try:
        folder = await asyncio.to_thread(SlotFolder, path, facts.block_tokens)
        await _prove(slots.client, folder)
        identities = await _identities(slots.client, dialect, facts, folder.path)
        files = await asyncio.to_thread(folder.scan, frozenset(identities.values()))
        await asyncio.to_thread(folder.bound)
    except (SlotFolderError, VllmError) as error:
        raise SlotError(str(error)) from None
    slots.keeper.open(folder, identities, files)
    log.info(
        "slots of %s are saved in %s, at most %.1f GiB; %d of earlier are there",
        slots.client.url,
        path,
        folder.max_bytes / (1 << 30),
        len(files),
    )


async def _prove(client: VllmClient, folder: SlotFolder) -> None:
    """Has a slot saved, and looks for its file. Raises SlotError and VllmError."""
    name = folder.file_name(secrets.token_hex(20))
    await client.post("/slots/0?action=save", {"filename": name}, timeout_s=60.0)
    place = folder.path / name
    try:
        place.unlink()
    except FileNotFoundError:
        raise SlotError(f"the server saves slots in another folder than {folder.path}") from None
    except OSError as error:
        raise SlotError(f"files in {folder.path} cannot be deleted: {error.strerror}") from None


async def _identities(
    client: VllmClient, dialect: ServerDialect, facts: VllmFacts, folder: Path
) -> dict[str, bytes]:
    """Identities of the model, and of each adapter whose file can be read. Raises SlotError and
    VllmError."""
    logprobs = await next_logprobs(client, PROMPT, TOP)
    try:
        weights = await asyncio.to_thread(weights_digest, Path(facts.offer.root))
        identity = await asyncio.to_thread(identity_of, folder, weights, logprobs)
    except OSError as error:
        text = f"its weights {facts.offer.root} tell which model it is, and cannot be read here"
        raise SlotError(f"{text}: {error.strerror}") from None
    found = {"": identity}
    for lora in dialect.loras if isinstance(dialect, LlamaDialect) else ():
        try:
            digest = await asyncio.to_thread(weights_digest, Path(lora.path))
        except OSError:
            log.info("slots with the adapter %s are not saved: it cannot be read", lora.name)
        else:
            found[lora.name] = with_adapter(identity, digest)
    return found

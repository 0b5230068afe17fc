"""The block keys of an external engine's cached blocks, derived from its events (vLLM's KV events).

Such an engine identifies a block by its own hash and reports the block's parent and tokens, from
which Moonpool's block key follows. A block whose parent was never reported has no key, nor do its
successors.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.protocol.block_layout import KEY_BYTES, extend_keys, root_key
from moonpool.types import BlockKey, Struct, salt_part

ForeignHash = bytes | int


class ExternalBlocksStored(Struct, frozen=True):
    """Successive blocks were stored; each is the parent of the next.

    `parent` is None at the beginning of a prompt. `salt` is the prompt's cache salt, if any, and
    `adapter` its LoRA adapter; a salt that Moonpool made names both. `medium` is the memory that
    holds the blocks; a block may be in several.
    """

    hashes: tuple[ForeignHash, ...]
    parent: ForeignHash | None
    token_ids: tuple[int, ...]
    salt: str | None = None
    adapter: str = ""
    medium: str = ""


class ExternalBlocksRemoved(Struct, frozen=True):
    hashes: tuple[ForeignHash, ...]
    medium: str = ""


class ExternalBlocksCleared(Struct, frozen=True):
    """All blocks of the engine's cache were removed."""


ForeignEvent = ExternalBlocksStored | ExternalBlocksRemoved | ExternalBlocksCleared


def salt_of(
    layout_fingerprint: bytes, tenant: str, adapter: str = "", always: bool = False
) -> str | None:
    """Returns the cache salt of a tenant's prompts to an adapter: their root key, which the events
    then contain. Returns None if no salt is needed. `always`: whether a salt is returned without a
    tenant, too, because a pool names its blocks by the salt."""
    has_salt = salt_part(tenant) or adapter or always
    return root_key(layout_fingerprint, tenant, adapter).hex() if has_salt else None


class Changes:
    """The keys gained and lost since the last `take`, without those both gained and lost."""

    def __init__(self) -> None:
        self._gained: dict[BlockKey, None] = {}
        self._lost: dict[BlockKey, None] = {}

    def gain(self, key: BlockKey) -> None:
        if key in self._lost:
            del self._lost[key]
        else:
            self._gained[key] = None

    def lose(self, key: BlockKey) -> None:
        if key in self._gained:
            del self._gained[key]
        else:
            self._lost[key] = None

    def take(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        gained, lost = tuple(self._gained), tuple(self._lost)
        self._gained, self._lost = {}, {}
        return gained, lost


class ExternalBlocks:
    """The block keys that an external engine holds, and their changes since the last take."""

    def __init__(self, layout_fingerprint: bytes, block_tokens: int) -> None:
        self._root = root_key(layout_fingerprint, "")
        self._block_tokens = block_tokens
        self._keys: dict[ForeignHash, BlockKey] = {}
        self._copies: dict[tuple[ForeignHash, str], int] = {}  # number of copies by hash and medium
        self._media: dict[ForeignHash, int] = {}
        self._holders: dict[BlockKey, int] = {}  # number of block hashes with each key
        self._changes = Changes()
        self.other_block_tokens = 0
        """The block size of the last event whose blocks have another size than this engine's; 0
        means that there was no such event."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._holders)

    def holds(self, key: BlockKey) -> bool:
        return key in self._holders

    def hear(self, event: ForeignEvent) -> None:
        match event:
            case ExternalBlocksStored():
                self._on_stored(event)
            case ExternalBlocksRemoved():
                for name in event.hashes:
                    self._forget(name, event.medium)
            case ExternalBlocksCleared():
                self._copies.clear()
                for name in list(self._keys):
                    self._drop(name)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Returns the keys gained and the keys lost since the last call."""
        return self._changes.take()

    def _on_stored(self, event: ExternalBlocksStored) -> None:
        if event.parent is None:
            parent = self._root_of(event)
        else:
            parent = self._keys.get(event.parent)
        if len(event.token_ids) != len(event.hashes) * self._block_tokens:
            self.other_block_tokens = len(event.token_ids) // max(len(event.hashes), 1)
            return
        if parent is None:
            return
        keys: list[BlockKey] = []
        extend_keys(keys, event.token_ids, self._block_tokens, parent)
        for name, key in zip(event.hashes, keys, strict=True):
            place = name, event.medium
            copies = self._copies.get(place, 0)
            # prompts that were computed at the same time leave several copies
            self._copies[place] = copies + 1
            if not copies:
                self._media[name] = self._media.get(name, 0) + 1
            if name not in self._keys:
                self._keys[name] = key
                self._hold(key)

    def _root_of(self, event: ExternalBlocksStored) -> BlockKey | None:
        """Returns the root key, or None for a salt that Moonpool did not make, and for an adapter
        without a salt."""
        if event.salt is None:
            return None if event.adapter else self._root
        try:
            root = bytes.fromhex(event.salt)
        except ValueError:
            return None
        return BlockKey(root) if len(root) == KEY_BYTES else None

    def _forget(self, name: ForeignHash, medium: str) -> None:
        copies = self._copies.get((name, medium), 0)
        if copies > 1:
            self._copies[name, medium] = copies - 1
        elif copies:
            del self._copies[name, medium]
            self._media[name] -= 1
            if not self._media[name]:
                self._drop(name)

    def _drop(self, name: ForeignHash) -> None:
        key = self._keys.pop(name)
        del self._media[name]
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._changes.lose(key)

    def _hold(self, key: BlockKey) -> None:
        count = self._holders.get(key, 0)
        self._holders[key] = count + 1
        if not count:
            self._changes.gain(key)


class AssumedBlocks:
    """The blocks assumed of an engine that publishes no events.

    The server is assumed to keep what it computed, up to `num_blocks`, and to evict the least
    recently used blocks, the end of a prompt first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # keys of the held blocks, with the least recently used first
        self._held: dict[BlockKey, None] = {}
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._held)

    def holds(self, key: BlockKey) -> bool:
        return key in self._held

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Notes that the blocks of a prompt, from its beginning, were computed or reused."""
        for key in reversed(keys[: self._num_blocks]):
            if key in self._held:
                del self._held[key]
            else:
                self._changes.gain(key)
            self._held[key] = None
        while len(self._held) > self._num_blocks:
            key = next(iter(self._held))
            del self._held[key]
            self._changes.lose(key)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        return self._changes.take()

"""Our names of the blocks that another engine caches, by what it tells of them (vLLM's KV events).

Such an engine names a block by a hash of its own, and says of which parent and tokens it is; so the
key that we would give it follows. A block whose parent was never told of (it was there before us)
cannot be named, nor what continues it. Knows nothing of bytes, nor of how the events came.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvcache.hashing import KEY_BYTES, extend_keys, root_key
from moonpool.types import BlockKey, Struct

ForeignHash = bytes | int


class ForeignStored(Struct, frozen=True):
    """Blocks in a row, each the next one's parent; `parent` None: they begin a prompt. `salt`: what
    sets the prompt apart, None if nothing does. `medium`: where they lie; a block may be in
    several."""

    hashes: tuple[ForeignHash, ...]
    parent: ForeignHash | None
    token_ids: tuple[int, ...]
    salt: str | None = None
    medium: str = ""


class ForeignRemoved(Struct, frozen=True):
    hashes: tuple[ForeignHash, ...]
    medium: str = ""


class ForeignCleared(Struct, frozen=True):
    """Everything is gone."""


ForeignEvent = ForeignStored | ForeignRemoved | ForeignCleared


def salt_of(layout_fingerprint: bytes, tenant: str) -> str | None:
    """What to set a tenant's prompts apart with there: its root key, so that events name it."""
    return root_key(layout_fingerprint, tenant).hex() if tenant else None


class _Changes:
    """What was gained and lost since it was last asked for; what came and went in between is
    neither."""

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


class ForeignNames:
    """Which of our names another engine holds. Their changes gather until they are taken."""

    def __init__(self, layout_fingerprint: bytes, block_tokens: int) -> None:
        self._root = root_key(layout_fingerprint, "")
        self._block_tokens = block_tokens
        self._keys: dict[ForeignHash, BlockKey] = {}
        self._copies: dict[tuple[ForeignHash, str], int] = {}  # by medium
        self._media: dict[ForeignHash, int] = {}
        self._holders: dict[BlockKey, int] = {}  # hashes of that name
        self._changes = _Changes()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._holders)

    def holds(self, key: BlockKey) -> bool:
        return key in self._holders

    def hear(self, event: ForeignEvent) -> None:
        match event:
            case ForeignStored():
                self._on_stored(event)
            case ForeignRemoved():
                for name in event.hashes:
                    self._forget(name, event.medium)
            case ForeignCleared():
                self._copies.clear()
                for name in list(self._keys):
                    self._drop(name)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Names held now that were not when this was last asked for, and the other way round."""
        return self._changes.take()

    def _on_stored(self, event: ForeignStored) -> None:
        if event.parent is None:
            parent = self._root_of(event.salt)
        else:
            parent = self._keys.get(event.parent)
        if parent is None or len(event.token_ids) != len(event.hashes) * self._block_tokens:
            return
        keys: list[BlockKey] = []
        extend_keys(keys, event.token_ids, self._block_tokens, parent)
        for name, key in zip(event.hashes, keys, strict=True):
            place = name, event.medium
            copies = self._copies.get(place, 0)
            self._copies[place] = copies + 1  # prompts computed side by side leave several
            if not copies:
                self._media[name] = self._media.get(name, 0) + 1
            if name not in self._keys:
                self._keys[name] = key
                self._hold(key)

    def _root_of(self, salt: str | None) -> BlockKey | None:
        """None for a salt that is none of ours."""
        if salt is None:
            return self._root
        try:
            root = bytes.fromhex(salt)
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


class AssumedNames:
    """The same without a word from the engine: it is taken to keep what it computed, up to
    `num_blocks`, and to let go of what was used longest ago, the end of a prompt first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: dict[BlockKey, None] = {}  # the longest unused first
        self._changes = _Changes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._held)

    def holds(self, key: BlockKey) -> bool:
        return key in self._held

    def use(self, keys: Sequence[BlockKey]) -> None:
        """A prompt's, from its beginning: computed, or found."""
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

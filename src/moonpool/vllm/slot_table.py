"""Decides which slot of a server computes a request, and what is saved and restored for it; this
module is pure.

A llama-server keeps one sequence of tokens in each slot. A slot's KVCache can be saved to a file,
and restored into any slot. The table knows what slots and files hold, because it puts each request
in a slot. Prompts of two tenants or two adapters have no key in common, so neither gets the other's
KVCache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.protocol.block_layout import block_keys
from moonpool.types import BlockKey
from moonpool.vllm.block_names import Changes, ForeignEvent

LEAST_SAVED_TOKENS = 256
"""Fewer tokens than this are computed again faster than they are read from a file."""
NAME_BYTES = 20


class Prompt(NamedTuple):
    """A prompt that a slot is to compute. `root`: the key with which its chain of keys begins.
    `identity`: the identity of the model and adapter that compute the prompt; b"" means unknown, so
    the prompt is not saved."""

    token_ids: tuple[int, ...]
    root: BlockKey
    keys: tuple[BlockKey, ...]
    identity: bytes = b""


@dataclass(frozen=True, slots=True)
class Held:
    """The tokens whose KVCache is in a slot, or in a file. `name`: the name of the file; "" means
    that it is not saved. `token_ids` and `identity`: the content of a slot and its identity, for
    the file."""

    root: BlockKey
    keys: tuple[BlockKey, ...]
    num_tokens: int
    name: str = ""
    token_ids: tuple[int, ...] = ()
    identity: bytes = b""


def held_by(prompt: Prompt, block_tokens: int, generated: Sequence[int] = ()) -> Held:
    """Returns what a slot holds after it has computed the prompt and generated tokens, of which the
    last one was never an input."""
    tokens = (*prompt.token_ids, *generated[:-1])
    keys = tuple(block_keys(tokens, block_tokens, prompt.root)) if prompt.keys else ()
    name = name_of(prompt.identity, prompt.root, tokens) if prompt.identity else ""
    return Held(prompt.root, keys, len(tokens), name, tokens, prompt.identity)


def name_of(identity: bytes, root: BlockKey, token_ids: Sequence[int]) -> str:
    """The name of the file with the KVCache of these tokens, by nothing but content."""
    made = hashlib.blake2b(digest_size=NAME_BYTES, person=b"moonpool slot")
    for part in (identity, root, array("I", token_ids).tobytes()):
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()


class SlotPlan(NamedTuple):
    """Save what the slot holds, restore a file into it, and let it compute. `reuses`: whether the
    request may use the slot's content. `expected_tokens`: how many of the prompt's tokens should be
    in the slot."""

    slot: int
    reuses: bool
    save: Held | None = None
    restore: Held | None = None
    expected_tokens: int = 0


@dataclass(slots=True)
class _Slot:
    held: Held | None = None  # None if the slot is empty, or its content is unknown
    is_busy: bool = False
    used: int = 0


class SlotTable:
    """The slots of one server, from its start. Like `KnownCache`, it tells which block keys the
    server has."""

    source = "slots"
    distrusts_events = False
    other_block_tokens = 0

    def __init__(self, num_slots: int, block_tokens: int, saves: bool = False) -> None:
        """`saves`: whether content that leaves a slot is saved."""
        self.block_tokens = block_tokens
        self.saves = saves
        self.files: dict[str, Held] = {}
        self._slots = [_Slot() for _ in range(num_slots)]
        self._by_key: dict[BlockKey, dict[str, None]] = {}  # names of files by key
        self._holders: Counter[BlockKey] = Counter()
        self._changes = Changes()
        self._root: BlockKey | None = None  # root of the first prompt
        self.has_one_root = True
        """Whether all prompts were of one tenant and one adapter."""
        self._uses = 0

    # Requests

    def begin(self, prompt: Prompt) -> SlotPlan | None:
        """Makes the slot busy until `end`. Returns None if all slots are busy."""
        free = [number for number, slot in enumerate(self._slots) if not slot.is_busy]
        if not free:
            return None
        self._root = self._root or prompt.root
        self.has_one_root = self.has_one_root and prompt.root == self._root
        number, restore = self._choose(free, prompt)
        slot = self._slots[number]
        slot.is_busy, slot.used = True, self._next_use()
        held = slot.held
        common = self._common(held, prompt)
        is_cut = held is not None and (restore is not None or common < len(held.keys))
        save = held if is_cut and self._is_worth(held) else None
        after = restore if restore is not None else held
        common = self._common(after, prompt)
        # If less than half of the slot is reused, the server may search its own memory for a better
        # prefix, which may be another tenant's.
        stays = after is not None and 2 * common * self.block_tokens >= after.num_tokens > 0
        reuses = bool(prompt.keys) and (stays or self.has_one_root)
        expected_tokens = common * self.block_tokens if reuses else 0
        return SlotPlan(number, reuses, save, restore, expected_tokens)

    def end(self, number: int, held: Held | None) -> None:
        """Makes a slot free. `held`: its content now, or None if that is unknown."""
        slot = self._slots[number]
        slot.is_busy = False
        slot.used = self._next_use()
        self.put(number, held)

    def put(self, number: int, held: Held | None) -> None:
        """Notes that a slot has other content than before."""
        slot = self._slots[number]
        before, slot.held = slot.held, held
        self._hold(held)
        self._let_go(before)

    def unsaved(self) -> tuple[int, Held] | None:
        """Returns a free slot to save while nothing else is to be done."""
        for number, slot in enumerate(self._slots):
            if not slot.is_busy and self._is_worth(slot.held):
                assert slot.held is not None
                return number, slot.held
        return None

    def lock(self, number: int) -> None:
        """Makes a free slot busy until `end`."""
        self._slots[number].is_busy = True

    @property
    def is_idle(self) -> bool:
        return not any(slot.is_busy for slot in self._slots)

    def forget_slots(self) -> None:
        """Notes that others have used the free slots."""
        for number, slot in enumerate(self._slots):
            if not slot.is_busy:
                self.put(number, None)

    # Files

    def add_file(self, file: Held) -> tuple[str, ...]:
        """Returns the names of files that become needless, because this file continues them."""
        if file.name in self.files:
            return ()
        continued = {name for key in file.keys for name in self._by_key.get(key, ())}
        needless = [name for name in continued if self._is_within(self.files[name], file)]
        self.files[file.name] = file
        for key in file.keys:
            self._by_key.setdefault(key, {})[file.name] = None
        self._hold(file)
        for name in needless:
            self.drop_file(name)
        return tuple(needless)

    def drop_file(self, name: str) -> None:
        file = self.files.pop(name, None)
        if file is None:
            return
        for key in file.keys:
            names = self._by_key[key]
            del names[name]
            if not names:
                del self._by_key[key]
        self._let_go(file)

    @staticmethod
    def _is_within(file: Held, other: Held) -> bool:
        return len(file.keys) < len(other.keys) and other.keys[: len(file.keys)] == file.keys

    # Methods that `KnownCache` has, too

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._holders)

    def holds(self, key: BlockKey) -> bool:
        return key in self._holders

    def hear(self, events: Sequence[ForeignEvent], lost: bool, now: float) -> None:
        """Does nothing, because such a server publishes no events."""

    def note_computed(self, keys: Sequence[BlockKey], now: float, is_named: bool) -> None:
        """Does nothing, because `end` tells the same."""

    def note_ended(self, keys: Sequence[BlockKey]) -> None:
        """Does nothing, because `end` tells the same."""

    def judge(self, now: float) -> bool:
        return False

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        return self._changes.take()

    # The choice

    def _choose(self, free: Iterable[int], prompt: Prompt) -> tuple[int, Held | None]:
        """Returns the slot for a prompt, and the file to restore into it, or None. A file is chosen
        if it has at least LEAST_SAVED_TOKENS more of the prompt than any free slot. Otherwise the
        slot with most of the prompt is chosen if at least half of its content is reused, else the
        slot that is least likely to be needed."""
        by_common = sorted(
            free, key=lambda n: (self._common(self._slots[n].held, prompt), self._slots[n].used)
        )
        best = by_common[-1]
        held = self._slots[best].held
        common = self._common(held, prompt)
        is_continued = held is not None and common == len(held.keys) > 0
        file = self._longest_file(prompt)
        gained = self._common(file, prompt) - common
        if file is not None and gained * self.block_tokens >= LEAST_SAVED_TOKENS:
            return (best if is_continued else self._least_missed(by_common)), file
        if held is not None and common and (is_continued or 2 * common >= len(held.keys)):
            return best, None
        return self._least_missed(by_common), None

    def _least_missed(self, free: Sequence[int]) -> int:
        def order(number: int) -> tuple[bool, bool, int]:
            slot = self._slots[number]
            return slot.held is not None, self._is_worth(slot.held), slot.used

        return min(free, key=order)

    def _longest_file(self, prompt: Prompt) -> Held | None:
        if not prompt.identity:
            return None
        for key in reversed(prompt.keys):
            names = self._by_key.get(key)
            if names:
                return min((self.files[name] for name in names), key=lambda file: file.num_tokens)
        return None

    def _common(self, held: Held | None, prompt: Prompt) -> int:
        """The number of blocks from the beginning that both have."""
        if held is None:
            return 0
        most = min(len(held.keys), len(prompt.keys))
        # in a chain, one equal key means that all keys before it are equal
        for number in range(most, 0, -1):
            if held.keys[number - 1] == prompt.keys[number - 1]:
                return number
        return 0

    def _is_worth(self, held: Held | None) -> bool:
        """Whether the content is worth saving."""
        if held is None or not self.saves or not held.name or held.name in self.files:
            return False
        if held.num_tokens < LEAST_SAVED_TOKENS or not held.keys:
            return False
        return held.keys[-1] not in self._by_key  # otherwise, a file has the same blocks or more

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _hold(self, held: Held | None) -> None:
        for key in held.keys if held is not None else ():
            if not self._holders[key]:
                self._changes.gain(key)
            self._holders[key] += 1

    def _let_go(self, held: Held | None) -> None:
        for key in held.keys if held is not None else ():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._changes.lose(key)

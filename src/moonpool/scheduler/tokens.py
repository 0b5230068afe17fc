"""The tokens of one request: the prompt, and those generated after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload


class Tokens(Sequence[int]):
    """Prompt and generated tokens as one sequence that grows at its end.

    The prompt is shared and never copied, because it may hold a million tokens. It is only sliced,
    so it may be a `range` where the values of the tokens do not matter.
    """

    __slots__ = ("_first_generated", "_generated", "_prompt", "_prompt_ids", "size")

    def __init__(self, prompt: Sequence[int], num_prompt_tokens: int) -> None:
        """After a fault, `prompt` holds earlier generated tokens past `num_prompt_tokens`."""
        self._prompt = prompt
        self._first_generated = num_prompt_tokens
        self._generated: list[int] = []
        self._prompt_ids: frozenset[int] | None = None
        self.size = len(prompt)  # equals `len`, but costs no call; read at every step

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            assert step == 1
            return self.between(start, stop)
        size = len(self._prompt)
        position = index + self.size if index < 0 else index
        return self._prompt[position] if position < size else self._generated[position - size]

    def between(self, start: int, stop: int) -> Sequence[int]:
        """Returns `[start:stop]`; neither may be negative or beyond the end."""
        size = len(self._prompt)
        if stop <= size:
            return self._prompt[start:stop]
        if start >= size:
            return self._generated[start - size : stop - size]
        return (*self._prompt[start:], *self._generated[: stop - size])

    @property
    def newest(self) -> int:
        """The last token."""
        return self._generated[-1] if self._generated else self._prompt[-1]

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        self._generated.append(token_id)
        self.size += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds generated tokens."""
        self._generated.extend(token_ids)
        self.size = len(self._prompt) + len(self._generated)

    def pop(self) -> int:
        """Removes and returns the newest token, which must have been appended."""
        token_id = self._generated.pop()
        self.size -= 1
        return token_id

    @property
    def generated(self) -> Sequence[int]:
        """All tokens after the request's prompt; callers must not change it."""
        if self._first_generated == len(self._prompt):
            return self._generated
        return (*self._prompt[self._first_generated :], *self._generated)

    @property
    def prompt_ids(self) -> frozenset[int]:
        """The distinct tokens of the prompt, computed at the first use."""
        if self._prompt_ids is None:
            self._prompt_ids = frozenset(self._prompt)
        return self._prompt_ids

    @property
    def num_generated(self) -> int:
        """Number of tokens after the request's prompt."""
        return self.size - self._first_generated

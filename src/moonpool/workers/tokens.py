"""The tokens of one work: its prompt, shared and never copied, and what was generated after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload


class Tokens(Sequence[int]):
    """Prompt and generated tokens as one sequence that grows at its end. A prompt may be a million
    tokens long, or a `range` that stands for tokens nobody needs to know: it is only sliced."""

    __slots__ = ("_first_generated", "_generated", "_prompt", "_prompt_ids", "size")

    def __init__(self, prompt: Sequence[int], num_prompt_tokens: int) -> None:
        """`prompt` may hold generated tokens after its first `num_prompt_tokens` (a fault came)."""
        self._prompt = prompt
        self._first_generated = num_prompt_tokens
        self._generated: list[int] = []
        self._prompt_ids: frozenset[int] | None = None
        self.size = len(prompt)  # as `len`, for those who ask at every step

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
        """As `[start:stop]`, of which neither is negative nor beyond the end."""
        size = len(self._prompt)
        if stop <= size:
            return self._prompt[start:stop]
        if start >= size:
            return self._generated[start - size : stop - size]
        return (*self._prompt[start:], *self._generated[: stop - size])

    @property
    def newest(self) -> int:
        return self._generated[-1] if self._generated else self._prompt[-1]

    def append(self, token_id: int) -> None:
        self._generated.append(token_id)
        self.size += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        self._generated.extend(token_ids)
        self.size = len(self._prompt) + len(self._generated)

    def pop(self) -> int:
        """Takes back the newest token, which must not be of the prompt."""
        token_id = self._generated.pop()
        self.size -= 1
        return token_id

    @property
    def generated(self) -> Sequence[int]:
        """All tokens after the request's prompt; not to be changed."""
        if self._first_generated == len(self._prompt):
            return self._generated
        return (*self._prompt[self._first_generated :], *self._generated)

    @property
    def prompt_ids(self) -> frozenset[int]:
        """Each token of the prompt once; made when it is first asked for."""
        if self._prompt_ids is None:
            self._prompt_ids = frozenset(self._prompt)
        return self._prompt_ids

    @property
    def num_generated(self) -> int:
        return self.size - self._first_generated

"""The calls of one output: which functions exist, and the increments of calls to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moonpool.api.output_text.said import Sink, ToolCallDelta
from moonpool.api.output_text.source import TextSource

Functions = Mapping[str, Mapping[str, Any]]
"""The schema of each function's parameters."""
NewId = Callable[[str, int, str], str]
"""Returns the id of a call. Takes the function's name, the number of the call among those of the
conversation, and the id that the model gave it or ""."""


class CallWriter:
    """Numbers the calls and writes their increments. A call of an unknown function does not count
    as a call."""

    def __init__(
        self,
        functions: Functions,
        only_one: bool,
        num_before: int,
        new_id: NewId,
        spelled: Callable[[str], str],
        source: TextSource,
        sink: Sink,
    ) -> None:
        """`only_one`: further calls are left out. `num_before`: calls earlier in the chat.
        `spelled`: special tokens are part of an argument's text, so they are written out."""
        self.functions = functions
        self.spelled = spelled
        self._source = source
        self._only_one = only_one
        self._num_before = num_before
        self._new_id = new_id
        self._sink = sink
        self._count = 0
        self._ids = set[str]()
        self._is_empty = True  # the last call has no arguments yet

    def knows(self, name: str | None) -> bool:
        return name in self.functions

    def begin(self, name: str, own_id: str = "") -> None:
        """Passes on what was read so far: there is no way back."""
        self._source.settle()
        number = self._num_before + self._count
        call_id = self._new_id(name, number, own_id)
        if own_id and call_id in self._ids:  # the model gave it to another call too
            others = (self._new_id(name, number + i, "") for i in range(self._count + 1))
            call_id = next((other for other in others if other not in self._ids), call_id)
        self._ids.add(call_id)
        self._count += 1
        self._is_empty = self._sink.is_in_call = True
        self._write(ToolCallDelta(self._count - 1, call_id, name, ""))

    def add(self, arguments: str) -> None:
        self._is_empty = False
        self._write(ToolCallDelta(self._count - 1, None, None, self.spelled(arguments)))

    def end(self) -> None:
        """Ends a call that is complete. One without arguments has an empty object of them."""
        if self._is_empty:
            self.add("{}")
        self._sink.is_in_call = False

    def _write(self, delta: ToolCallDelta) -> None:
        if not (self._only_one and self._count > 1):
            self._sink.call(delta)

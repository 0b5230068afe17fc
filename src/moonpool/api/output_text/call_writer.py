"""The tool calls of one output: which functions exist, and the increments of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moonpool.api.output_text.said import Sink, ToolCallDelta
from moonpool.api.output_text.source import TextSource

Functions = Mapping[str, Mapping[str, Any]]
"""The schema of each function's parameters."""
NewId = Callable[[str, int, str], str]
"""Makes the id of a call. A `NewId` takes the function's name, the number of the call in the
conversation, and the id that the model wrote or ""."""


class CallWriter:
    """Numbers the tool calls and writes their increments. A call of an unknown function does not
    count as a call."""

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
        """`only_one`: whether calls after the first are left out. `num_before`: number of calls
        earlier in the chat. `spelled`: writes out the special tokens of an argument's text."""
        self.functions = functions
        self.spelled = spelled
        self._source = source
        self._only_one = only_one
        self._num_before = num_before
        self._new_id = new_id
        self._sink = sink
        self._count = 0
        self._ids = set[str]()
        self._is_empty = True  # whether the last call has no arguments so far

    def knows(self, name: str | None) -> bool:
        return name in self.functions

    def begin(self, name: str, own_id: str = "") -> None:
        """Begins a call. What was read so far counts, and can no longer be taken back."""
        self._source.settle()
        number = self._num_before + self._count
        call_id = self._new_id(name, number, own_id)
        if own_id and call_id in self._ids:  # the model gave the same id to another call
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
        """Ends a call that is complete. A call without arguments gets an empty object."""
        if self._is_empty:
            self.add("{}")
        self._sink.is_in_call = False

    def _write(self, delta: ToolCallDelta) -> None:
        if not (self._only_one and self._count > 1):
            self._sink.call(delta)

"""The JSON of `/v1/responses`, whole and as events: one answer as a row of items, which are what
was said and the calls of tools."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.api.choice import Choice, Delta
from moonpool.api.errors import ApiError
from moonpool.api.responses_body import ResponsesBody
from moonpool.api.tools import Piece
from moonpool.types import FinishReason

_encode = msgspec.json.encode
Item = dict[str, Any]


class ResponseWriter:
    """One answer. `events` follow its increments; `whole` is the response as it stands."""

    def __init__(self, response_id: str, model: str, body: ResponsesBody, choice: Choice) -> None:
        self._id = response_id
        self._model = model
        self._body = body
        self._choice = choice
        self._created_s = int(time.time())
        self._items: list[Item] = []
        self._open = False  # the last item may grow
        self._number = 0

    def begin(self) -> bytes:
        whole = self.whole()
        return b"".join(
            self._event(f"response.{name}", response=whole) for name in ("created", "in_progress")
        )

    def events(self, delta: Delta) -> bytes:
        parts: list[bytes] = []
        if delta.text:
            self._say(delta.text, parts)
        for piece in delta.calls:
            self._call(piece, parts)
        if delta.finish_reason is not None:
            if not self._items:
                self._say("", parts)
            self._close(parts, cut=delta.finish_reason is FinishReason.LENGTH)
        return b"".join(parts)

    def end(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def whole(self) -> dict[str, Any]:
        body, choice = self._body, self._choice
        reason = choice.finish_reason
        status, incomplete = "in_progress", None
        if reason is not None:
            status = "completed"
        if reason is FinishReason.LENGTH:
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        sampling = choice.request.sampling
        wanted = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if wanted is None else _without_nulls(wanted)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else self._usage(),
            "user": None,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        asked = len(choice.prompt.token_ids)
        return {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + choice.num_tokens,
        }

    def _say(self, text: str, parts: list[bytes]) -> None:
        if not self._open or self._items[-1]["type"] != "message":
            self._close(parts)
            item: Item = {
                "type": "message",
                "id": f"msg_{secrets.token_hex(12)}",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            self._add(item, parts)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            parts.append(self._of_part("response.content_part.added", part=part))
        if text:
            self._items[-1]["content"][0]["text"] += text
            parts.append(self._of_part("response.output_text.delta", delta=text, logprobs=[]))

    def _call(self, piece: Piece, parts: list[bytes]) -> None:
        if piece.name is not None:
            self._close(parts)
            item: Item = {
                "type": "function_call",
                "id": f"fc_{secrets.token_hex(12)}",
                "call_id": piece.call_id,
                "name": piece.name,
                "arguments": "",
                "status": "in_progress",
            }
            self._add(item, parts)
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            parts.append(
                self._of_item("response.function_call_arguments.delta", delta=piece.arguments)
            )

    def _add(self, item: Item, parts: list[bytes]) -> None:
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.added", output_index=index, item=item))

    def _close(self, parts: list[bytes], cut: bool = False) -> None:
        """The last item grows no more."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            done = "response.output_text.done"
            parts.append(self._of_part(done, text=part["text"], logprobs=[]))
            parts.append(self._of_part("response.content_part.done", part=part))
        else:
            done = "response.function_call_arguments.done"
            parts.append(self._of_item(done, arguments=item["arguments"], name=item["name"]))
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.done", output_index=index, item=item))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def whole_response(writer: ResponseWriter, deltas: Sequence[Delta]) -> bytes:
    for delta in deltas:
        writer.events(delta)
    return _encode(writer.whole())


def _without_nulls(wanted: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return {name: value for name, value in found.items() if value is not None}

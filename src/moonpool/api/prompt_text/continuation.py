"""Continues the last message of a chat (`continue_final_message`), as transformers does.

The template renders the message with a mark at its end, and the prompt ends there.
"""

from __future__ import annotations

from typing import Any

from moonpool.api.errors import ApiError

_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


def mark_final(plain: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's content, and returns the content. Raises ApiError."""
    content: str = plain[-1]["content"]
    if not content:
        where = f"messages[{len(plain) - 1}].content"
        text = f"'continue_final_message' needs text to continue, but '{where}' has none."
        raise ApiError(text, param=where)
    plain[-1] = plain[-1] | {"content": content + _MARK}
    return content


def cut_at_mark(rendered: str, final: str) -> str:
    """Returns a rendered chat up to the end of its last message, as transformers does: without the
    space at the end of the message where the template removes that."""
    before, mark, after = rendered.rpartition(_MARK.rstrip())
    if not mark or final.strip() not in before:
        text = (
            "The chat template does not show the text of the last message, so"
            " 'continue_final_message' cannot be served."
        )
        raise ApiError(text, param="continue_final_message", code="chat_template_error")
    return before if after.startswith(" ") else before.rstrip()

"""Structured output of a model that reasons: the grammar applies to the text after the
reasoning."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

NAME = "reasoning"
"""Name of the grammar around the answer's grammar."""
_GAP = r"/\n{0,2}/"  # models write line breaks after the tag


class Tag(NamedTuple):
    """A `Tag` is one tag of reasoning. `token_id`: the token's id, if the tag is a special
    token."""

    text: str
    token_id: int | None

    @property
    def terminal(self) -> str:
        return json.dumps(self.text) if self.token_id is None else f"<[{self.token_id}]>"


def is_json(grammar: str) -> bool:
    """Whether the answers are JSON."""
    if not grammar.startswith("{"):
        return False
    return json.loads(grammar)["grammars"][0].get("json_schema") is not None


def behind_reasoning(grammar: str, opening: Tag, closing: Tag, is_open: bool) -> str:
    """Returns a grammar of llguidance with free reasoning before what `grammar` holds.

    `is_open`: whether the prompt has the opening tag. Otherwise the model may begin with the tag,
    or with the answer.
    """
    answer: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": grammar}]
    if grammar.startswith("{"):
        answer = json.loads(grammar)["grammars"]
    name = answer[0].get("name") or "answer"
    answer[0]["name"] = name
    begin = "thoughts" if is_open else f"({opening.terminal} thoughts)?"
    if closing.token_id is None:
        thoughts = f"thoughts: words {_GAP}\nwords[suffix={closing.terminal}]: /(.|\\n)*/\n"
    else:
        thoughts = f"thoughts: /(.|\\n)*/ {closing.terminal} {_GAP}\n"
    lark = f"start: {begin} @{name}\n{thoughts}"
    return json.dumps({"grammars": [{"name": NAME, "lark_grammar": lark}, *answer]})

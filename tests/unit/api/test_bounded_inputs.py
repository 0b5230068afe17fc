"""Tests that allowed large inputs, and odd small ones, get an answer or one clear error."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_head import ScriptedHead, call, chat, complete, spoken

from moonpool.api.structured_output import MOST_CHOICES


@pytest.mark.parametrize("name", ["self", "context", "source", "add_tools", "args", "kwargs"])
def test_a_template_argument_may_have_any_name(name: str) -> None:
    arguments = {"chat_template_kwargs": {name: 1}}
    assert chat(ScriptedHead(), **arguments).status_code == 200
    body = {"messages": [{"role": "user", "content": "x"}], **arguments}
    assert call(ScriptedHead(), "/tokenize", body).status_code == 200


@pytest.mark.parametrize(
    "choices",
    [
        ["c" * 100 + str(number) for number in range(MOST_CHOICES)],
        ["a", "ab", "abc", "b"],
        ['x"y', "\\n", "é 🎉", "a\nb"],
    ],
)
def test_choices_that_begin_alike_can_be_followed(choices: list[str]) -> None:
    for choice in (choices[0], choices[-1]):
        head = ScriptedHead(lambda _, text=choice: spoken(text))  # type: ignore[misc]
        answer = complete(head, structured_outputs={"choice": choices})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == choice
    broken = ScriptedHead(lambda _: spoken(choices[0] + "?"))
    refused = complete(broken, structured_outputs={"choice": choices})
    assert refused.json()["error"]["code"] == "form_lost"


@pytest.mark.long
def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_computed() -> None:
    properties: dict[str, Any] = {f"property_{n}": {"type": "integer"} for n in range(3000)}
    head = ScriptedHead()
    wanted = {"json": {"type": "object", "properties": properties}}
    refused = complete(head, structured_outputs=wanted)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs"
    assert head.requests == []

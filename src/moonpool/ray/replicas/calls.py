"""The facts of a call that a router passes on: the prompt, as far as it can be read, and the
limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.types import ProgramContext, Struct

BYTES_PER_TOKEN = 4
"""About the bytes per token of a prompt's text: routers have no tokenizer."""
TEXT_FIELDS = ("messages", "prompt", "input")
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
HINT_FIELDS = ("vllm_xargs", "agent_hint", "prompt_cache_key")
"""The fields that name the program (agent) of a call."""


class ReplicaCall(Struct, frozen=True):
    """One call of a deployment. `token_ids` represent pieces of its prompt: equal prefixes have
    equal ids, and there are about as many ids as tokens. `max_tokens` 0 means that the call states
    no limit. `program`: the program to which the call belongs, or None if its client names none."""

    call_id: str
    token_ids: tuple[int, ...]
    max_tokens: int = 0
    model: str = ""
    program: ProgramContext | None = None


def read_call(
    call_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], model: str = ""
) -> ReplicaCall:
    """Reads a call of a handle: the first argument that has a prompt, whatever its kind. A call
    whose arguments are unknown, such as a raw HTTP request, has no prompt."""
    for value in (*args, *kwargs.values()):
        fields = _fields_of(value)
        prompts = [fields[name] for name in TEXT_FIELDS if fields.get(name)]
        if not prompts:
            continue
        limits = [fields[name] for name in LIMIT_FIELDS if isinstance(fields.get(name), int)]
        tokens = _tokens_of(prompts[0])
        return ReplicaCall(
            call_id=call_id,
            token_ids=tokens,
            max_tokens=max(limits[0], 0) if limits else 0,
            model=model,
        )
    return ReplicaCall(call_id=call_id, token_ids=(0,), model=model)


def hints_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the fields of a handle's call that describe its program, by `HINT_FIELDS`."""
    for value in (*args, *kwargs.values()):
        fields = _fields_of(value)
        if any(fields.get(name) for name in TEXT_FIELDS):
            return tuple(fields.get(name) for name in HINT_FIELDS)
    return (None,) * len(HINT_FIELDS)


def _fields_of(value: Any) -> Mapping[str, Any]:
    """The fields of a dictionary, of a pydantic model as Serve LLM has, or of a plain prompt."""
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, Mapping):
        return value
    names = (*TEXT_FIELDS, *LIMIT_FIELDS, *HINT_FIELDS)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _tokens_of(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(t, int) for t in prompt):
        return tuple(prompt)
    data = _text_of(prompt).encode("utf-8", "surrogatepass")
    pieces = range(0, max(len(data), 1), BYTES_PER_TOKEN)
    return tuple(int.from_bytes(data[at : at + BYTES_PER_TOKEN], "little") for at in pieces)


def _text_of(prompt: Any) -> str:
    """Returns a text such that a longer conversation's text begins with a shorter one's."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list | tuple):
        return "".join(f"{_text_of(part)}\0" for part in prompt)
    if hasattr(prompt, "model_dump"):
        prompt = prompt.model_dump(exclude_none=True)
    return json.dumps(prompt, sort_keys=True, default=str)


def count_tokens(item: Any) -> int:
    """About how many tokens an item of a stream has: its events, where it has any."""
    if isinstance(item, list | tuple):
        return sum(map(count_tokens, item))
    if isinstance(item, bytes):
        return max(item.count(b"data: {"), 1)
    return max(item.count("data: {"), 1) if isinstance(item, str) else 1

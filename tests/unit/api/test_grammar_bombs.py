"""Tests grammars that end the process that compiles them, or take much of its time: the client must
get one clear error immediately."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from scripted_head import ScriptedHead, complete

from moonpool.api.errors import ApiError
from moonpool.api.grammars.check import GrammarCheck
from tests.processes import children


def chained(num_rules: int, rule: str = "r{next}") -> str:
    rules = (f"r{n}: " + rule.format(next=n + 1) for n in range(num_rules))
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def chained_schema(num_levels: int, level: Any) -> dict[str, Any]:
    levels = {f"d{n}": level({"$ref": f"#/$defs/d{n + 1}"}) for n in range(num_levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**levels, f"d{num_levels}": {"type": "string"}}}


DEADLY = {
    "chain of rules": {"grammar": chained(7000)},
    "chain of groups": {"grammar": chained(2500, '"b" ((r{next} "c")?)*')},
    "chain of terminals": {"grammar": chained(7000).replace("r", "R").replace("staRt", "start")},
    "chain of references": {"json": chained_schema(3000, lambda ref: ref)},
    "chain of items": {"json": chained_schema(3000, lambda ref: {"items": ref})},
    "chain of objects": {
        "json": chained_schema(
            1400, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]}
        )
    },
}
COSTLY = {
    "long division": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "many stars": {"regex": "(ab|c)*" * 12_800},
    "doubling terminals": {
        "grammar": "start: A0\n"
        + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60))
        + 'A60: "x"'
    },
    "huge object": {
        "json": {
            "type": "object",
            "properties": {f"p{n}": {"type": "integer"} for n in range(2000)},
        }
    },
    "open parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "recursion without end": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "all of all": {
        "json": {
            "type": "object",
            "allOf": [
                {"anyOf": [{"properties": {f"a{n}": {"const": c}}} for c in (1, 2)]}
                for n in range(25)
            ],
        }
    },
}
HARMLESS = {
    "at least a billion": {"json": {"type": "string", "minLength": 10**9}},
    "up to a billion": {"json": {"type": "array", "items": {}, "maxItems": 10**9}},
    "doubling definitions": {
        "json": chained_schema(40, lambda ref: {"anyOf": [ref, ref]}),
    },
    "many values": {"json": {"enum": [f"value-{n}" for n in range(5000)]}},
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | '},
    "forty references": {"json": chained_schema(40, lambda ref: {"items": ref})},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "many stars" else ())  # seconds
        for name in (*DEADLY, *COSTLY)
    ],
)
def test_a_grammar_that_nobody_could_follow_is_one_clear_error(name: str) -> None:
    head = ScriptedHead()
    refused = complete(head, structured_outputs=(DEADLY | COSTLY)[name])
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "structured_outputs"), error
    assert "\n" not in error["message"] and len(error["message"]) < 500
    assert head.requests == []


@pytest.mark.parametrize("name", HARMLESS)
def test_a_grammar_that_only_looks_large_is_served(name: str) -> None:
    head = ScriptedHead()
    complete(head, structured_outputs=HARMLESS[name])
    assert len(head.requests) == 1


@pytest.mark.long
def test_the_loop_turns_while_grammars_are_compiled_and_each_is_compiled_once() -> None:
    async def check() -> int:
        checks, turns = GrammarCheck(), 0
        grammar = '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 1000003}}]}'

        async def ask() -> None:
            with pytest.raises(ApiError, match="more than 1 s to compile"):
                await checks.require("structured_outputs", grammar, "", 600.0)

        asked = asyncio.create_task(ask())
        while not asked.done():
            await asyncio.sleep(0.01)
            turns += 1
        checks.close()
        await ask()  # starts no process, because the grammar is known
        return turns

    assert asyncio.run(check()) > 10


def test_a_compiler_that_is_killed_is_replaced() -> None:
    async def check() -> None:
        before, checks = children(), GrammarCheck()
        await checks.require("f", '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', "", 60.0)
        [pid] = children() - before
        os.kill(pid, signal.SIGKILL)
        while pid in children():
            await asyncio.sleep(0.01)
        await checks.require("f", '{"grammars": [{"lark_grammar": "start: \\"b\\""}]}', "", 60.0)
        assert len(children() - before) == 1
        checks.close()

    asyncio.run(check())

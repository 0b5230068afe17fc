"""Tests how the program of a call is found: by every name that clients send, and by no other
field."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.api.errors import ApiError
from moonpool.api.program_identity import program_of
from moonpool.types import ProgramContext


def ids(*given: Any, **headers: str) -> tuple[str, str]:
    found = program_of(as_headers(headers), *given)
    assert found is not None
    return found.program_id, found.parent_id


def as_headers(headers: dict[str, str]) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}


def test_a_call_without_a_name_is_no_program() -> None:
    assert program_of({}) is None
    assert program_of({}, {"other": 1}, None, {"odd": 1}) is None
    assert program_of({}, None, None, "a\0key") is None


def test_headers_of_agents() -> None:
    claude = {"x_claude_code_session_id": "s"}
    assert ids(**claude) == ("s", "")
    assert ids(**claude, x_claude_code_agent_id="a") == ("s:a", "s")
    below = {"x_claude_code_agent_id": "b", "x_claude_code_parent_agent_id": "a"}
    assert ids(**claude, **below) == ("s:b", "s:a")
    assert ids(session_id="t", thread_id="t2") == ("t:t2", "t")
    assert ids(x_session_id="u") == ("u", "")
    assert ids(None, None, "key") == ("key", "")


def test_the_context_of_vllm_router_goes_first() -> None:
    context = {
        "program_id": "p",
        "parent_program_id": "q",
        "root_program_id": "r",
        "blocks_parent": False,
        "workflow_type": "swe",
        "agent_type": "Explore",
        "expected_output_length": 40,
        "expected_resume": False,
        "kv_retention_ttl": 7,
    }
    found = program_of({b"x-session-id": b"u"}, {"agentic_context": context})
    assert found is not None
    assert (found.program_id, found.parent_id, found.root_id) == ("p", "q", "r")
    assert (found.kind, found.expected_tokens) == ("swe/Explore", 40)
    assert not found.blocks_parent and found.ends and found.keep_s == 7.0
    derived = {"agentic_context": {"session_id": "s", "agent_id": "a", "parent_agent_id": "b"}}
    assert ids(derived) == ("s:a", "s:b")
    assert ids(None, {"session_id": "c", "parent_session_id": "d"}) == ("c", "d")


def context_of(fields: dict[str, Any], **headers: str) -> ProgramContext:
    found = program_of(as_headers(headers), {"agentic_context": fields})
    assert found is not None
    return found


def test_every_field_of_vllm_router_is_read() -> None:
    found = context_of(
        {
            "program_id": "workflow:child",
            "task_id": "workflow",
            "session_id": "session",
            "agent_id": "child",
            "parent_agent_id": "lead",
            "root_program_id": "workflow:root",
            "blocks_parent": False,
            "expected_resume": True,
            "agent_role": "subagent",
            "spawn_reason": "research",
            "workflow_profile_id": "swe",
            "profile_version": 3,
            "step_id": 7,
            "request_id": "request",
            "priority": 10,
            "deadline_seconds": 30,
            "expected_output_length": 2048,
            "kv_retention_ttl_seconds": 5,
        }
    )
    assert found == ProgramContext(
        program_id="workflow:child",
        parent_id="workflow",
        root_id="workflow:root",
        blocks_parent=False,
        kind="swe@3/subagent/research",
        expected_tokens=2048,
        keep_s=5.0,
        priority=10,
    )


@pytest.mark.parametrize(
    ("fields", "program_id", "parent_id", "blocks"),
    [
        # These names are derived like in vllm-router; the lead agent of a task has the task's name.
        ({"task_id": "t"}, "t", "", False),
        ({"task_id": "t", "agent_id": "lead"}, "t", "", False),
        ({"task_id": "t", "agent_id": "a"}, "t:a", "t", True),
        ({"task_id": "t", "agent_id": "t:a"}, "t:a", "t", True),
        ({"task_id": "t", "agent_id": "a", "parent_agent_id": "t:b"}, "t:a", "t:b", True),
        ({"task_id": "t", "agent_id": "a", "agent_role": "lead"}, "t:a", "", False),
        ({"task_id": "t", "program_id": "p", "agent_role": "subagent"}, "p", "t", True),
        (
            {"program_id": "w:c", "agent_id": "c", "parent_agent_id": "b", "session_id": "s"},
            "w:c",
            "w:b",
            True,
        ),
        ({"program_id": "c", "parent_program_id": "p"}, "c", "p", False),
        ({"program_id": "c", "parent_id": "p", "blocking_parent": True}, "c", "p", True),
        ({"program_id": " p "}, "p", "", False),
    ],
)
def test_a_program_is_derived_as_by_vllm_router(
    fields: dict[str, Any], program_id: str, parent_id: str, blocks: bool
) -> None:
    found = context_of(fields)
    assert (found.program_id, found.parent_id) == (program_id, parent_id)
    assert found.blocks_parent is blocks and not found.ends


def test_a_context_without_a_session_has_that_of_the_headers() -> None:
    claude = {"x_claude_code_session_id": "s", "x_claude_code_agent_id": "a"}
    found = context_of({"expected_output_tokens": 40, "step_id": 2}, **claude)
    assert (found.program_id, found.parent_id, found.expected_tokens) == ("s:a", "s", 40)
    assert context_of({"step_id": 2}, x_session_id="u") == ProgramContext(
        program_id="u", blocks_parent=False
    )
    assert context_of({"task_id": "t"}, x_session_id="u").program_id == "t"
    assert program_of({}, {"agentic_context": {"step_id": 2}}) is None


def test_a_hint_has_the_fields_of_vllm_router() -> None:
    hint = {"session_id": "c", "parent_session_id": "p", "blocks_parent": False}
    found = program_of({}, None, hint | {"expected_resume": False})
    assert found == ProgramContext(program_id="c", parent_id="p", blocks_parent=False, ends=True)
    found = program_of({}, None, {"session_id": "c", "parent_session_id": "p"})
    assert found == ProgramContext(program_id="c", parent_id="p")


def test_a_context_may_be_a_text_as_vllm_takes_no_object() -> None:
    assert ids({"agentic_context": '{"program_id": "p", "parent_id": "q"}'}) == ("p", "q")


def test_a_header_ends_a_program() -> None:
    found = program_of({b"x-session-id": b"u", b"x-program-ends": b"true"})
    assert found is not None and found.ends


@pytest.mark.parametrize(
    "context",
    [
        "text",
        "[1]",
        '{"program_id": "p"}' + " " * 16_384,
        {"program_id": "x" * 300},
        {"program_id": True},
        {"program_id": "p", "parent_program_id": "p"},
        {"program_id": "p", "expected_output_tokens": -1},
        {"program_id": "p", "blocks_parent": "yes"},
        {"program_id": "p\n2026-01-01 forged line"},
        {"program_id": "p", "expected_output_tokens": 10**400},
        {"program_id": "p", "priority": "high"},
        {"program_id": "p", "kv_retention_ttl_seconds": float("nan")},
        {str(n): n for n in range(100)},
    ],
)
def test_wrong_contexts_are_refused_by_field(context: Any) -> None:
    with pytest.raises(ApiError) as caught:
        program_of({}, {"agentic_context": context})
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("vllm_xargs.agentic_context")


def test_long_headers_are_refused() -> None:
    with pytest.raises(ApiError, match="longer than 256"):
        program_of({b"x-session-id": b"u" * 300})


def test_sessions_of_opencode_name_their_parent() -> None:
    found = program_of({b"x-session-id": b"ses_b", b"x-parent-session-id": b"ses_a"})
    assert found == ProgramContext(program_id="ses_b", parent_id="ses_a")
    lead = program_of({b"x-session-id": b"ses_a", b"x-parent-session-id": b"ses_a"})
    assert lead == ProgramContext(program_id="ses_a")

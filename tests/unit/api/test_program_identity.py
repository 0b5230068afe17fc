"""Which program a call belongs to: every name that clients send, and none that is wrong."""

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
    assert ids(**claude, x_claude_code_agent_id="a") == ("s/a", "s")
    below = {"x_claude_code_agent_id": "b", "x_claude_code_parent_agent_id": "a"}
    assert ids(**claude, **below) == ("s/b", "s/a")
    assert ids(session_id="t", thread_id="t2") == ("t/t2", "t")
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
    assert ids(derived) == ("s/a", "s/b")
    assert ids(None, {"session_id": "c", "parent_session_id": "d"}) == ("c", "d")


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

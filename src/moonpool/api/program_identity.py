"""Which program (agent) a call belongs to, by what its client sends.

The first of these that is there decides; they are never mixed:

1. `vllm_xargs.agentic_context` of the body, with the fields that vllm-router reads: an object, or
   its JSON as a text, because vLLM itself takes no object there;
2. `agent_hint` of the body: `session_id`, `parent_session_id`, `blocking`;
3. `x-claude-code-session-id`, `x-claude-code-agent-id` and `x-claude-code-parent-agent-id`;
4. `session-id` and `thread-id`, as Codex and OpenCode send them;
5. `x-session-id`, and `x-parent-session-id` as OpenCode sends it;
6. `prompt_cache_key` of the body.

A session without the name of an agent is its lead program, and each agent of it a sub-agent: of the
parent that is named, else of the lead. `X-Program-Ends: true` says that no call follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.api.errors import ApiError
from moonpool.types import MALFORMED, ProgramContext

MAX_NAME = 256
"""Characters of a name."""
MAX_FIELDS = 64
MAX_TEXT = 16_384
"""Characters of a context that is a text."""
MAX_SECONDS = 86_400.0
MAX_TOKENS = 1 << 24
ENDS = b"x-program-ends"
_WHERE = "vllm_xargs.agentic_context"


def program_of(
    headers: Mapping[bytes, bytes],
    xargs: Any = None,
    agent_hint: Any = None,
    prompt_cache_key: Any = None,
) -> ProgramContext | None:
    """The program of a call, or None if the client names none. Raises ApiError."""
    ends = headers.get(ENDS, b"").strip().lower() in (b"1", b"true")
    context = xargs.get("agentic_context") if isinstance(xargs, dict) else None
    if context is not None:
        return _from_context(_object(_read(context), _WHERE), ends)
    if agent_hint is not None:
        return _from_hint(_object(agent_hint, "agent_hint"), ends)
    for session, agent, parent in (
        (
            b"x-claude-code-session-id",
            b"x-claude-code-agent-id",
            b"x-claude-code-parent-agent-id",
        ),
        (b"session-id", b"thread-id", b""),
    ):
        task = _header(headers, session)
        if task:
            return _of_task(task, _header(headers, agent), _header(headers, parent), ends)
    session_id = _header(headers, b"x-session-id")
    if session_id:
        parent_id = _header(headers, b"x-parent-session-id")
        return ProgramContext(
            program_id=session_id, parent_id="" if parent_id == session_id else parent_id, ends=ends
        )
    key = prompt_cache_key
    if isinstance(key, str) and 0 < len(key) <= MAX_NAME and _is_plain(key):
        return ProgramContext(program_id=key, ends=ends)
    return None


def _of_task(task: str, agent: str, parent: str, ends: bool) -> ProgramContext:
    """The lead program of a task, or one of its sub-agents."""
    if not agent or agent == task:
        return ProgramContext(program_id=task, ends=ends)
    parent_id = f"{task}/{parent}" if parent and parent not in (task, agent) else task
    return ProgramContext(
        program_id=f"{task}/{agent}", parent_id=parent_id, root_id=task, ends=ends
    )


def _from_context(fields: Mapping[str, Any], ends: bool) -> ProgramContext | None:
    task = _name(fields, "task_id", "session_id", "root_program_id", "root_id")
    agent, parent_agent = _name(fields, "agent_id", "agent"), _name(fields, "parent_agent_id")
    program = _name(fields, "program_id")
    if not program and not task:
        return None
    derived = _of_task(task, agent, parent_agent, ends) if task else None
    program_id = program or (derived.program_id if derived is not None else "")
    parent = _name(fields, "parent_program_id", "parent_id")
    if not parent and derived is not None and derived.parent_id != program_id:
        parent = derived.parent_id
    if parent == program_id and parent:
        raise _wrong("parent_program_id", "must differ from program_id")
    resumes = _truth(fields, "expected_resume", "resume")
    kinds = (_name(fields, name) for name in ("workflow_profile_id", "workflow_type"))
    role = _name(fields, "agent_type", "subagent_type", "agent_role")
    blocks = _truth(fields, "blocks_parent", "blocking_parent")
    return ProgramContext(
        program_id=program_id,
        parent_id=parent,
        root_id=_name(fields, "root_program_id", "root_id") or (task if parent else ""),
        blocks_parent=True if blocks is None else blocks,
        kind="/".join(part for part in (*kinds, role) if part),
        tool=_name(fields, "tool"),
        expected_tokens=int(
            _number(fields, MAX_TOKENS, "expected_output_tokens", "expected_output_length") or 0
        ),
        ends=ends or resumes is False,
        keep_s=_number(fields, MAX_SECONDS, "kv_retention_ttl", "kv_retention_ttl_seconds"),
    )


def _from_hint(fields: Mapping[str, Any], ends: bool) -> ProgramContext | None:
    session = _name(fields, "session_id", where="agent_hint")
    if not session:
        return None
    parent = _name(fields, "parent_session_id", where="agent_hint")
    blocks = _truth(fields, "blocking", where="agent_hint")
    return ProgramContext(
        program_id=session,
        parent_id="" if parent == session else parent,
        blocks_parent=True if blocks is None else blocks,
        ends=ends,
    )


def _read(context: Any) -> Any:
    """The context, out of its JSON if it is a text."""
    if not isinstance(context, str) or len(context) > MAX_TEXT:
        return context
    try:
        return msgspec.json.decode(context)
    except MALFORMED:
        return context


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_FIELDS:
        text = f"{where} must be an object with at most {MAX_FIELDS} fields"
        raise ApiError(text, param=where, code="invalid_value")
    return value


def _is_plain(name: str) -> bool:
    """Whether a name can stand in a log's line and on a terminal."""
    return not any(ord(one) < 32 or 127 <= ord(one) < 160 for one in name)


def _wrong(name: str, what: str, where: str = _WHERE) -> ApiError:
    return ApiError(f"{where}.{name} {what}", param=f"{where}.{name}", code="invalid_value")


def _name(fields: Mapping[str, Any], *names: str, where: str = _WHERE) -> str:
    """The first of these fields that is there; "" means that none is."""
    for name in names:
        value = fields.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _wrong(name, "must be a text", where)
        if len(str(value)) > MAX_NAME:
            raise _wrong(name, f"is longer than {MAX_NAME} characters", where)
        if not _is_plain(str(value)):
            raise _wrong(name, "has a control character", where)
        return str(value)
    return ""


def _truth(fields: Mapping[str, Any], *names: str, where: str = _WHERE) -> bool | None:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise _wrong(name, "must be true or false", where)
        return value
    return None


def _number(fields: Mapping[str, Any], most: float, *names: str) -> float | None:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most:  # also of NaN, and of integers of any length
            raise _wrong(name, f"must be a number from 0 to {most:,.0f}")
        return float(value)
    return None


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    value = headers.get(name, b"").strip().decode("latin-1") if name else ""
    if len(value) > MAX_NAME:
        text = f"{name.decode()} is longer than {MAX_NAME} characters"
        raise ApiError(text, param=name.decode(), code="invalid_header")
    return value

"""Determines which program (agent) a call belongs to, from what its client sends.

The first of these sources that is present decides; they are never combined:

1. `vllm_xargs.agentic_context` of the body, with the fields that vllm-router reads. The value is an
   object, or the object's JSON as a string, because vLLM itself accepts no object in `vllm_xargs`.
   If it lacks the session, the agent or the agent's parent, the headers below give them;
2. `agent_hint` of the body: `session_id`, `parent_session_id`, `blocks_parent`, `expected_resume`;
3. `x-claude-code-session-id`, `x-claude-code-agent-id` and `x-claude-code-parent-agent-id`;
4. `session-id` and `thread-id`, as Codex and OpenCode send them;
5. `x-session-id`; with a session of 3 to 5, `x-parent-session-id` names the parent of the session's
   lead program, as OpenCode sends it;
6. `prompt_cache_key` of the body.

A session without the name of an agent, or with the agent name "lead", is the session's lead
program. Each other agent of the session is a sub-agent, "SESSION:AGENT" as in vllm-router. The
sub-agent's parent is the named parent, or otherwise the lead. `X-Program-Ends: true` says that no
call follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.api.errors import ApiError
from moonpool.types import LEAD, MALFORMED, ProgramContext

MAX_NAME = 256
"""Most characters of a name."""
MAX_FIELDS = 64
MAX_TEXT = 16_384
"""Most characters of a context that is sent as text."""
MAX_SECONDS = 86_400.0
MAX_TOKENS = 1 << 24
MAX_PRIORITY = 1 << 31
SUBAGENT = "subagent"
ENDS = b"x-program-ends"
_SCHEMAS = (
    (
        b"x-claude-code-session-id",
        b"x-claude-code-agent-id",
        b"x-claude-code-parent-agent-id",
    ),
    (b"session-id", b"thread-id", b""),
    (b"x-session-id", b"", b""),
)
"""Headers of session, agent and the agent's parent; b"" means that there is no such header."""
PARENT_SESSION = b"x-parent-session-id"
HEADERS = frozenset({*(name for names in _SCHEMAS for name in names if name), PARENT_SESSION, ENDS})
_WHERE = "vllm_xargs.agentic_context"


def program_of(
    headers: Mapping[bytes, bytes],
    xargs: Any = None,
    agent_hint: Any = None,
    prompt_cache_key: Any = None,
) -> ProgramContext | None:
    """Returns the program of a call, or None if the client names none. Raises ApiError."""
    ends = headers.get(ENDS, b"").strip().lower() in (b"1", b"true")
    context = xargs.get("agentic_context") if isinstance(xargs, dict) else None
    if context is not None:
        return _from_context(_object(_read(context), _WHERE), _named_by(headers), ends)
    if agent_hint is not None:
        return _from_hint(_object(agent_hint, "agent_hint"), ends)
    session, agent, parent = _named_by(headers)
    if session:
        found = _of_task(session, agent, parent, ends)
        above = _header(headers, PARENT_SESSION)
        if above in ("", session) or found.parent_id:
            return found
        return msgspec.structs.replace(found, parent_id=above)
    key = prompt_cache_key
    if isinstance(key, str) and 0 < len(key) <= MAX_NAME and _is_plain(key):
        return ProgramContext(program_id=key, ends=ends)
    return None


def _named_by(headers: Mapping[bytes, bytes]) -> tuple[str, str, str]:
    """Returns session, agent and the agent's parent from the headers of agents; "" means that the
    header is missing."""
    for session, agent, parent in _SCHEMAS:
        task = _header(headers, session)
        if task:
            return task, _header(headers, agent), _header(headers, parent)
    return "", "", ""


def _of_task(task: str, agent: str, parent: str, ends: bool) -> ProgramContext:
    """Returns the lead program of a task, or one of its sub-agents."""
    agent, parent = _within(task, agent), _within(task, parent)
    program_id = _scoped(task, agent)
    if not agent:
        return ProgramContext(program_id=program_id, ends=ends)
    return ProgramContext(
        program_id=program_id,
        parent_id=_scoped(task, "" if parent == agent else parent),
        root_id=task,
        ends=ends,
    )


def _within(task: str, agent: str) -> str:
    """Returns an agent's name within its task, or "" for the lead."""
    name = agent.removeprefix(f"{task}:") if task else agent
    return "" if name in (LEAD, task) else name


def _scoped(task: str, agent: str) -> str:
    return f"{task}:{agent}" if agent else task


def _from_context(
    fields: Mapping[str, Any], named: tuple[str, str, str], ends: bool
) -> ProgramContext | None:
    """`named`: session, agent and parent from the call's headers."""
    session, header_agent, header_parent = named
    task = _name(fields, "task_id", "session_id") or session
    root = _name(fields, "root_program_id", "root_id")
    task = task or root
    program_id = _name(fields, "program_id")
    if not program_id and not task:
        return None
    agent = _within(task, _name(fields, "agent_id", "agent") or header_agent)
    program_id = program_id or _scoped(task, agent)
    role = _name(fields, "agent_role") or (SUBAGENT if agent else "")
    parent = _name(fields, "parent_program_id", "parent_id")
    if parent == program_id:
        raise _wrong("parent_program_id", "must differ from program_id")
    if not parent:
        above = _name(fields, "parent_agent_id") or header_parent
        if above or role == SUBAGENT:
            # The agent's name may stand in an id of another form than the task's.
            begin = program_id.removesuffix(f":{agent}") if agent else program_id
            begin = begin if begin != program_id else task
            parent = _scoped(begin, _within(task, above)) if begin else ""
        parent = "" if parent == program_id else parent
    blocks = _truth(fields, "blocks_parent", "blocking_parent")
    kept_s = _number(fields, MAX_SECONDS, "kv_retention_ttl", "kv_retention_ttl_seconds")
    length = _number(fields, MAX_TOKENS, "expected_output_length", "expected_output_tokens")
    priority = _number(fields, MAX_PRIORITY, "priority", least=-MAX_PRIORITY)
    return ProgramContext(
        program_id=program_id,
        parent_id=parent,
        root_id=root or (task if parent else ""),
        blocks_parent=role == SUBAGENT if blocks is None else blocks,
        kind=_kind(fields),
        tool=_name(fields, "tool"),
        expected_tokens=int(length or 0),
        ends=ends or _truth(fields, "expected_resume", "resume") is False,
        keep_s=kept_s,
        priority=int(priority or 0),
    )


def _kind(fields: Mapping[str, Any]) -> str:
    """Returns what programs like this one have in common: the workflow, the role, and why it was
    started."""
    workflow, version = (
        _name(fields, "workflow_profile_id", "workflow_type"),
        _name(fields, "profile_version"),
    )
    parts = (
        f"{workflow}@{version}" if workflow and version else workflow,
        _name(fields, "agent_role"),
        _name(fields, "spawn_reason", "subagent_type", "agent_type"),
    )
    return "/".join(part for part in parts if part)


def _from_hint(fields: Mapping[str, Any], ends: bool) -> ProgramContext | None:
    session = _name(fields, "session_id", where="agent_hint")
    if not session:
        return None
    parent = _name(fields, "parent_session_id", where="agent_hint")
    blocks = _truth(fields, "blocks_parent", "blocking", where="agent_hint")
    resumes = _truth(fields, "expected_resume", where="agent_hint")
    return ProgramContext(
        program_id=session,
        parent_id="" if parent == session else parent,
        blocks_parent=True if blocks is None else blocks,
        ends=ends or resumes is False,
    )


def _read(context: Any) -> Any:
    """Returns the context, decoded from JSON if it is a text."""
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
    """Whether a name can be printed in a log line and on a terminal."""
    return not any(ord(one) < 32 or 127 <= ord(one) < 160 for one in name)


def _wrong(name: str, what: str, where: str = _WHERE) -> ApiError:
    return ApiError(f"{where}.{name} {what}", param=f"{where}.{name}", code="invalid_value")


def _name(fields: Mapping[str, Any], *names: str, where: str = _WHERE) -> str:
    """Returns the first of these fields that is present, or "" if none is."""
    for name in names:
        value = fields.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _wrong(name, "must be a text", where)
        text = str(value).strip(" ")
        if len(text) > MAX_NAME:
            raise _wrong(name, f"is longer than {MAX_NAME} characters", where)
        if not _is_plain(text):
            raise _wrong(name, "has a control character", where)
        return text
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


def _number(
    fields: Mapping[str, Any], most: float, *names: str, least: float = 0.0
) -> float | None:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # excludes NaN, and integers of any length
            raise _wrong(name, f"must be a number from {least:,.0f} to {most:,.0f}")
        return float(value)
    return None


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    value = headers.get(name, b"").strip().decode("latin-1") if name else ""
    if len(value) > MAX_NAME:
        text = f"{name.decode()} is longer than {MAX_NAME} characters"
        raise ApiError(text, param=name.decode(), code="invalid_header")
    return value

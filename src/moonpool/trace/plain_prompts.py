"""Prompts as texts, without a cluster's log: what load generators read.

* A line with one prompt: AIPerf's `single_turn` and `random_pool` (`text` or `texts`), and the
  custom files of `vllm bench serve` (`prompt`, `output_tokens`).
* ShareGPT's conversations: a list of messages `from` a human and from a model. Each answer becomes
  a call as long as its text; `jq -c '.[]' FILE > FILE.jsonl` writes each conversation on a line.

Without times, all calls begin at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.trace.agent_rows import Milliseconds
from moonpool.trace.corpora import ProgramLines, line_object, milliseconds_of, whole_length
from moonpool.trace.json_log import has_arrival
from moonpool.trace.programs import SESSION_BLOCK_TOKENS
from moonpool.trace.prompt_texts import answer_tokens, content_text, message_text, text_prompt
from moonpool.trace.row import UNTIMED, LineError, ParsedRow

_PROMPTS = ("prompt", "text", "texts")
_LENGTHS = ("output_tokens", "output_length", "max_tokens", "expected_output_len")
_OTHERS = ("type", "role", "timestamp", "delay", "image", "images", "audio", "audios", "video")
_KNOWN = frozenset((*_PROMPTS, *_LENGTHS, *_OTHERS, "videos", "image_files", "extra", "model"))
_HUMANS, _MODELS = ("human", "user"), ("gpt", "chatgpt", "bing", "bard", "assistant", "model")


def is_prompt(first: dict[str, Any]) -> bool:
    """Whether a file's first object is a prompt and what belongs to it."""
    if first.keys() <= _KNOWN:
        return any(name in first for name in _PROMPTS)
    # vLLM's custom files may have further columns, but a log would state when each request came.
    return isinstance(first.get("prompt"), str) and not has_arrival(first)


def is_sharegpt(first: dict[str, Any]) -> bool:
    """Whether a file's first object is one of ShareGPT's conversations."""
    return isinstance(first.get("conversations"), list)


class PromptParser:
    """Parses one prompt on each line."""

    format = "prompts"
    header_lines = 0
    units_per_s = 1000.0
    block_tokens = SESSION_BLOCK_TOKENS

    def __init__(self, first: dict[str, Any]) -> None:
        self.ignored = tuple(name for name in first if name not in _KNOWN)
        self._milliseconds = Milliseconds()

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError."""
        fields = line_object(line)
        name = next((name for name in _PROMPTS if fields.get(name) is not None), None)
        if name is None:
            found = ", ".join(map(str, list(fields)[:5])) or "nothing"
            raise LineError(f"this line has no prompt or text; found are {found}")
        prompt = text_prompt(content_text(fields[name]))
        num_output = self._answer(fields)
        if not prompt.num_tokens or not num_output:
            return None
        stamp = fields.get("timestamp", fields.get("delay"))
        time = milliseconds_of(0.0 if stamp is None else stamp, self._milliseconds)
        return ParsedRow(time, prompt.num_tokens, num_output, prompt.block_ids)

    def _answer(self, fields: dict[str, Any]) -> int:
        name = next((name for name in _LENGTHS if fields.get(name) is not None), None)
        if name is not None:
            value = fields[name]
            is_digits = isinstance(value, str) and value.isascii() and value.isdigit()
            return whole_length({name: int(value[:20])} if is_digits else fields, name)
        extra = fields.get("extra")
        return int(answer_tokens(extra if isinstance(extra, dict) else {}) or 1)


class ShareGptParser(ProgramLines):
    """Parses one conversation on each line."""

    format = "sharegpt"

    def parse_program(self, line: bytes) -> Sequence[ParsedRow]:
        """Raises LineError."""
        whole = line_object(line)
        messages = whole.get("conversations")
        if not isinstance(messages, list):
            raise LineError(f"conversations is {messages!r:.40}; it must be a list of messages")
        session = self._names.take(str(whole.get("id") or "conversation"))
        rows: list[ParsedRow] = []
        pending: list[dict[str, str]] = []
        for message in messages:
            if not isinstance(message, dict):
                raise LineError(f"a message of {session:.60} is no object")
            role = str(message.get("from", message.get("role", ""))).lower()
            text = content_text(message.get("value", message.get("content")))
            has_question = any(one["role"] in _HUMANS for one in pending)
            if role not in _MODELS or not has_question:
                pending.append({"role": role, "content": text})
                continue
            prompt, answer = text_prompt(message_text(pending)), text_prompt(text)
            rows.append(
                ParsedRow(
                    UNTIMED if rows else 0.0,
                    prompt.num_tokens,
                    answer.num_tokens,
                    prompt.block_ids,
                    session,
                    delay_s=0.0 if rows else None,
                    adds=True,
                )
            )
            pending = []
        return rows

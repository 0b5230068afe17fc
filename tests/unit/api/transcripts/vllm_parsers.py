"""Prints what vLLM's own parsers find in a text. Needs vLLM."""

from __future__ import annotations

from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from moonpool.api.output_text import harmony
from moonpool.api.output_text.formats import FORMATS
from moonpool.api.output_text.reasoning import ALL_TAGS


def tokenizer_of_bytes(text: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes, in whose vocabulary all marks of the text are tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    marks = [mark for form in FORMATS for mark in form.marks if not mark.endswith(("[", "=", '"'))]
    marks += [mark for tags in ALL_TAGS for mark in (*tags.opens, *tags.closes)]
    marks += [*harmony.MARKS, "<|python_tag|>"]
    marks = [mark for mark in set(marks) if mark in text]
    made.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def found_by_vllm(
    tool_parser: str,
    reasoning_parser: str,
    marks: list[str],
    prompt: str,
    text: str,
    tools: list[dict[str, Any]],
) -> dict[str, Any] | None:
    """Returns content, reasoning and calls, or None for harmony, whose vocabulary is a download."""
    if tool_parser == "openai":
        return None
    tokenizer = tokenizer_of_bytes(" ".join([*marks, "<|python_tag|>", prompt, text]))
    parser_class = ParserManager.get_parser(
        tool_parser, reasoning_parser or None, enable_auto_tools=True, model_name="m"
    )
    assert parser_class is not None
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="auto"
    )
    thinking = {"thinking": True, "enable_thinking": True} if reasoning_parser else {}
    parser = parser_class(tokenizer, request.tools, chat_template_kwargs=thinking)
    prompt_ids = tokenizer.encode(prompt)
    if hasattr(parser, "set_prompt_token_ids"):
        parser.set_prompt_token_ids(prompt_ids)
    reasoning, content, calls = parser.parse(
        text,
        request,
        enable_auto_tools=True,
        model_output_token_ids=tokenizer.encode(text),
    )
    return {
        "content": content or "",
        "reasoning": reasoning or "",
        "calls": [[call.name, call.arguments] for call in calls or ()],
    }

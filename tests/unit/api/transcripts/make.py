"""Makes transcripts.json: one turn of an assistant, written by the chat templates of many families,
with the results of vLLM's own parsers.

    python -m tests.unit.api.transcripts.make TEMPLATES...

TEMPLATES are folders with the *.jinja files of llama.cpp (`models/templates`, in the source
distribution of llama-cpp-python 0.3.36) and of vLLM (`examples`, in that of vLLM 0.32.0). Without
vLLM installed, its results are kept as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moonpool.api.output_text.formats import FORMATS
from moonpool.api.output_text.reasoning import ALL_TAGS
from moonpool.api.prompts import plain_messages
from moonpool.text.tokenizer import ChatTemplateError
from moonpool.text.tokenizers.chat_template import ChatTemplate

FILE = Path(__file__).with_name("transcripts.json")
LLAMA_CPP, VLLM = "llama.cpp models/templates", "vLLM examples"
REASONING = "The user wants Grüße 🎉 in a file,\nso I edit it: a < b."
CONTENT = "Let me see."
TEXT = 'Grüße 🎉\n  if x < 3 and "y" in z:\n\treturn [{}]\\n'
EDIT = {"path": "src/a b.py", "line": 12, "all": True, "tags": ["x", 1, None], "note": TEXT}
CALLS: list[tuple[str, dict[str, Any]]] = [("edit", EDIT), ("clock", {})]
PLAIN_CALLS: list[tuple[str, dict[str, Any]]] = [("edit", {"path": "src/a b.py"}), ("clock", {})]
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "all": {"type": "boolean"},
        "tags": {"type": "array"},
        "note": {"type": "string"},
    },
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": "It does.", "parameters": parameters},
    }
    for name, parameters in (("edit", PARAMETERS), ("clock", {"type": "object", "properties": {}}))
]


class Family(NamedTuple):
    """A template, vLLM's parsers for it, and the parts of the turn that the template can write."""

    name: str
    file: str
    tool_parser: str
    reasoning_parser: str = ""
    source: str = LLAMA_CPP
    num_calls: int = 2
    has_content: bool = True
    begin: str = ""  # the answer begins behind this text
    end: str = "<|im_end|>\n"
    arguments: Mapping[str, Any] = MappingProxyType({})
    calls: list[tuple[str, dict[str, Any]]] = CALLS


FAMILIES = (
    Family("Qwen2.5", "Qwen-Qwen2.5-7B-Instruct", "hermes"),
    Family("Qwen3", "Qwen-Qwen3-0.6B", "hermes", "qwen3"),
    Family("Qwen3-Coder", "Qwen3-Coder", "qwen3_coder"),
    Family("Qwen3.5", "Qwen3.5-4B", "qwen3_coder", "qwen3"),
    Family("Hermes 2 Pro", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes",
           has_content=False),
    Family("GLM-4.6", "GLM-4.6", "glm45", "glm45", end=""),
    Family("GLM-4.7-Flash", "GLM-4.7-Flash", "glm47", "glm47", end=""),
    Family("Granite 4", "ibm-granite-granite-4.0", "granite4", end="<|end_of_text|>\n"),
    Family("Seed-OSS", "ByteDance-Seed-OSS", "seed_oss", "seed_oss", end="<seed:eos>"),
    Family("MiniMax M2", "MiniMax-M2", "minimax_m2", "minimax_m2", end="[e~[\n"),
    Family("DeepSeek V3", "tool_chat_template_deepseekv3", "deepseek_v3", source=VLLM,
           end="<｜end▁of▁sentence｜>\n"),
    Family("DeepSeek R1", "tool_chat_template_deepseekr1", "deepseek_v3", source=VLLM,
           end="<｜end▁of▁sentence｜>"),
    Family("DeepSeek V3.1", "tool_chat_template_deepseekv31", "deepseek_v31", source=VLLM,
           begin="</think>", end="<｜end▁of▁sentence｜>"),
    Family("DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2", "deepseek_v32", "deepseek_v3",
           end="<｜end▁of▁sentence｜>", arguments={"thinking": True}),
    Family("DeepSeek V4", "deepseek-ai-DeepSeek-V4", "deepseek_v4", "deepseek_v4",
           end="<｜end▁of▁sentence｜>", arguments={"thinking": True}),
    Family("Kimi K2", "moonshotai-Kimi-K2", "kimi_k2", end="<|im_end|>"),
    Family("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407", "mistral", has_content=False,
           end="</s>"),
    Family("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506", "mistral",
           has_content=False, end="</s>"),
    Family("Devstral", "unsloth-mistral-Devstral-Small-2507", "mistral", end="</s>"),
    Family("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral",
           end="</s>"),
    Family("Llama 3.1", "meta-llama-Llama-3.1-8B-Instruct", "llama3_json", num_calls=1,
           has_content=False, end="<|eot_id|>"),
    Family("Llama 4", "tool_chat_template_llama4_pythonic", "llama4_pythonic", source=VLLM,
           has_content=False, end="<|eot|>", calls=PLAIN_CALLS),
    Family("gpt-oss", "openai-gpt-oss-120b", "openai", "openai_gptoss", num_calls=1,
           has_content=False, end="<|call|>"),
)  # fmt: skip


class Written(NamedTuple):
    """A family whose template does not write calls, so that their form comes from vLLM's tests."""

    name: str
    file: str
    tool_parser: str
    reasoning_parser: str
    marks: list[str]
    prompt_end: str
    text: str


_EDIT = json.dumps(EDIT, ensure_ascii=False)
_CALL, _CLOCK = f'{{"name": "edit", "arguments": {_EDIT}}}', '{"name": "clock", "arguments": {}}'
_PYTHON = ", ".join(f"{key}={value!r}" for key, value in EDIT.items())
WRITTEN = (
    Written("Granite 3", "granite", "granite", "", ["<|tool_call|>"], "<|end_of_role|>",
            f"<|tool_call|> [{_CALL}, {_CLOCK}]"),
    Written("Phi-4-mini", "phi4mini", "phi4_mini_json", "", ["functools["], "<|assistant|>",
            f"functools[{_CALL}, {_CLOCK}]"),
    Written("ERNIE 4.5", "ernie45_moe", "ernie45", "ernie45",
            ["<tool_call>", "<think>", "</think>", "<response>", "</response>"], "<think>\n",
            f"{REASONING}\n</think>\n\n\n<tool_call>\n{_CALL}\n</tool_call>\n"
            f"<tool_call>\n{_CLOCK}\n</tool_call>\n"),
    Written("OLMo 3", "olmo3", "olmo3", "", ["<function_calls>"], "<|im_start|>assistant\n",
            f"<function_calls>\nedit({_PYTHON})\nclock()\n</function_calls>"),
    Written("Magistral", "mistral", "mistral", "mistral", ["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
            "[/INST]", f"[THINK]{REASONING}[/THINK]{CONTENT}[TOOL_CALLS]edit[ARGS]{_EDIT}"
            "[TOOL_CALLS]clock[ARGS]{}"),
    Written("Kimi K2 Thinking", "kimi_k2", "kimi_k2", "kimi_k2",
            ["<|tool_calls_section_begin|>", "<think>", "</think>"], "<|im_middle|>",
            f"<think>{REASONING}</think>{CONTENT}<|tool_calls_section_begin|><|tool_call_begin|>"
            f"functions.edit:0<|tool_call_argument_begin|>{_EDIT}<|tool_call_end|><|tool_call_begin|>"
            "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"),
    Written("Llama 3.2", "pythonic", "pythonic", "", [], "<|end_header_id|>\n\n",
            f"[edit({_PYTHON}), clock()]"),
)  # fmt: skip


def render(family: Family, template: ChatTemplate) -> tuple[str, str]:
    """Returns the prompt and the model's part. Raises ChatTemplateError."""
    calls = [
        {
            "id": f"functions.{name}:{i}" if family.name == "Kimi K2" else f"abcdefgh{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for i, (name, arguments) in enumerate(family.calls[: family.num_calls])
    ]
    answer: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    answer["content"] = CONTENT if family.has_content else ""
    answer["reasoning_content"] = REASONING
    messages = plain_messages([{"role": "user", "content": "Edit it."}, answer])
    arguments = {"enable_thinking": True, **family.arguments}
    prompt = template.render(messages[:1], True, TOOLS, arguments)
    whole = template.render(messages, False, TOOLS, arguments)
    pairs = enumerate(zip(prompt, whole, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), len(prompt))
    text = whole[common:]
    if not text.endswith(family.end):
        raise ValueError(f"{family.name} ends with {text[-30:]!r}")
    before, begin, answer_text = text.rpartition(family.begin) if family.begin else ("", "", text)
    prompt = prompt[:common] + before + begin
    return prompt, answer_text[: len(answer_text) - len(family.end)]


def marks_of(source: str) -> list[str]:
    """Returns the marks of a template, which identify its format."""
    marks = [mark for form in FORMATS for mark in form.template_marks]
    for tags in ALL_TAGS:
        marks += [*tags.opens, *tags.closes, *(tags.answer or ())]
    return [mark for mark in dict.fromkeys(marks) if mark in source]


def main(folders: list[Path]) -> None:
    before = {entry["family"]: entry for entry in json.loads(FILE.read_text())}
    entries = []
    for family in FAMILIES:
        path = next(p for f in folders if (p := f / f"{family.file}.jinja").exists())
        source = path.read_text(encoding="utf-8")
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        try:
            prompt, text = render(family, ChatTemplate(source, special_tokens=names))
        except ChatTemplateError as error:
            raise SystemExit(f"{family.name}: {error}") from None
        origin = f"{family.source}/{family.file}.jinja"
        calls = family.calls[: family.num_calls]
        entries.append((family, origin, marks_of(source), prompt[-40:], text, calls))
    for written in WRITTEN:
        origin = f"vLLM tests/tool_parsers/test_{written.file}_tool_parser.py"
        entries.append((written, origin, written.marks, written.prompt_end, written.text, CALLS))
    found = [_entry(*entry, before) for entry in entries]
    FILE.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _entry(
    family: Family | Written,
    origin: str,
    marks: list[str],
    prompt: str,
    text: str,
    calls: list[tuple[str, dict[str, Any]]],
    before: dict[str, Any],
) -> dict[str, Any]:
    try:
        from tests.unit.api.transcripts.vllm_parsers import found_by_vllm
    except ImportError:
        vllm = before.get(family.name, {}).get("vllm")
    else:
        names = (family.tool_parser, family.reasoning_parser)
        vllm = found_by_vllm(*names, marks, prompt, text, TOOLS)
    return {
        "family": family.name,
        "source": origin,
        "marks": marks,
        "prompt_end": prompt,
        "text": text,
        "content": CONTENT if CONTENT in text else "",
        "reasoning": REASONING if REASONING in text else "",
        "calls": calls,
        "tool_parser": family.tool_parser,
        "reasoning_parser": family.reasoning_parser,
        "vllm": vllm,
    }


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])

"""Holds outputs of many families, in the form of their templates and tests, and reads these
outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moonpool.api.output_text.formats import FORMATS
from moonpool.api.output_text.model_output import CallRules, ModelOutput
from moonpool.api.output_text.reasoning import ALL_TAGS
from moonpool.api.output_text.said import Said
from moonpool.api.tools import together
from moonpool.text.tokenizer import ByteTextStream
from moonpool.text.tokenizers.byte import ByteTokenizer

FILE = Path(__file__).parent / "transcripts" / "transcripts.json"
TRANSCRIPTS: dict[str, dict[str, Any]] = {e["family"]: e for e in json.loads(FILE.read_text())}
FUNCTIONS: dict[str, Any] = {
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "all": {"type": "boolean"},
            "tags": {"type": "array"},
            "note": {"type": "string"},
        },
    },
    "clock": {"type": "object", "properties": {}},
}
MARKS = sorted(
    {m for form in FORMATS for m in form.marks if not m.endswith(("[", "=", '"', "s", "l"))}
    | {m for tags in ALL_TAGS[:3] for m in (*tags.opens, *tags.closes)}
)


class MarkTokenizer(ByteTokenizer):
    """A tokenizer with bytes, and with a special token for each mark."""

    def __init__(self, template: str, marks: list[str]) -> None:
        super().__init__()
        self.tool_template = template
        self.marks = {259 + number: mark for number, mark in enumerate(marks)}
        self._ids = {mark: token_id for token_id, mark in self.marks.items()}
        longest = sorted(map(re.escape, marks), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(longest) or '(?!)'})").split
        self.special_token_ids |= frozenset(self.marks)
        self.vocab_size += len(marks)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self._split(text):
            token = self._ids.get(part)
            ids += part.encode() if token is None else [token]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        mark = self.marks.get(token_id)
        return super().token_bytes(token_id) if mark is None else mark.encode()

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        kept = [self.token_bytes(i) for i in token_ids if i not in skipped]
        return b"".join(kept).decode("utf-8", "replace")

    def stream(self, skip_special_tokens: bool = True, shown: Any = None) -> ByteTextStream:
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return ByteTextStream(self.token_bytes, skipped, shown)


class Reading:
    """Reads one output of a family."""

    def __init__(self, family: str, marks: list[str], skips: bool = True, **rules: Any) -> None:
        self.entry = TRANSCRIPTS[family]
        tokenizer = MarkTokenizer(" ".join([*self.entry["marks"], "tools"]), marks)
        prompt = tokenizer.encode(self.entry["prompt_end"])
        number = iter(range(100, 1000))
        reader, shown = ModelOutput(tokenizer).reader(
            prompt, skips, CallRules(FUNCTIONS, **rules), lambda: f"{next(number)}abcdefghij"
        )
        assert reader is not None
        self.reader, self.tokenizer = reader, tokenizer
        self.stream = tokenizer.stream(skips, shown)
        self.said: list[Said] = []

    def tokens(self, ids: list[int], cut: bool = False) -> Reading:
        for token_id in ids:
            self.said += self.reader.push(self.stream.push(token_id))
        self.said += self.reader.push(self.stream.flush()) + self.reader.flush(cut)
        return self

    def pieces(self, *texts: str, cut: bool = False) -> Reading:
        for text in texts:
            self.said += self.reader.push(text)
        self.said += self.reader.flush(cut)
        return self

    @property
    def text(self) -> str:
        return "".join(said.text for said in self.said)

    @property
    def reasoning(self) -> str:
        return "".join(said.reasoning for said in self.said)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return together([call for said in self.said for call in said.calls])

    @property
    def arguments(self) -> list[tuple[str, str]]:
        functions = [call["function"] for call in self.calls]
        return [(function["name"], function["arguments"]) for function in functions]

    def check(self) -> None:
        """Asserts that all parts equal the parts from which the transcript was made."""
        wanted = [(name, arguments) for name, arguments in self.entry["calls"]]
        assert [(name, json.loads(text)) for name, text in self.arguments] == wanted
        assert self.text.strip() == self.entry["content"]
        assert self.reasoning.strip() == self.entry["reasoning"]


def _json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _tagged(name: str, arguments: dict[str, Any], shape: str) -> str:
    function, end, parameter, parameter_end = shape.split("|")
    parts = [
        parameter.format(key, "false" if not isinstance(value, str) else "true")
        + (value if isinstance(value, str) else json.dumps(value))
        + parameter_end
        for key, value in arguments.items()
    ]
    return function.format(name) + "".join(parts) + end


QWEN = "<function={}>\n|</function>\n|<parameter={}>\n|\n</parameter>\n"
SEED = "<function={}>|</function>\n|<parameter={}>|</parameter>\n"
MINIMAX = '<invoke name="{}">\n|</invoke>\n|<parameter name="{}">|</parameter>\n'
DSML = (
    '<｜DSML｜invoke name="{}">\n|</｜DSML｜invoke>\n|<｜DSML｜parameter name="{}" string="{}">|'
    "</｜DSML｜parameter>\n"
)
GLM = "{}|\n|\n<arg_key>{}</arg_key>\n<arg_value>|</arg_value>"


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


Calls = list[tuple[str, dict[str, Any]]]
WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("<tool_call>", lambda calls: "\n".join(
        f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)),
    "granite": ("<|tool_call|>", lambda calls:
        f"<|tool_call|>[{', '.join(_json(*call) for call in calls)}]"),
    "llama": ("", lambda calls: "; ".join(_json(*call, "parameters") for call in calls)),
    "qwen": ("<tool_call>", lambda calls: "\n".join(
        f"<tool_call>\n{_tagged(*call, QWEN)}</tool_call>" for call in calls)),
    "glm": ("<tool_call>", lambda calls: "\n".join(
        f"<tool_call>{_tagged(*call, GLM)}</tool_call>" for call in calls)),
    "seed": ("<seed:tool_call>", lambda calls: "\n".join(
        f"<seed:tool_call>\n{_tagged(*call, SEED)}</seed:tool_call>" for call in calls)),
    "minimax": ("<minimax:tool_call>", lambda calls: "<minimax:tool_call>\n" + "".join(
        _tagged(*call, MINIMAX) for call in calls) + "</minimax:tool_call>"),
    "dsml": ("｜DSML｜", lambda calls: "<｜DSML｜function_calls>\n" + "".join(
        _tagged(*call, DSML) for call in calls) + "</｜DSML｜function_calls>"),
    "deepseek v3": ("<｜tool▁calls▁begin｜>", lambda calls: "<｜tool▁calls▁begin｜>" + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>" for name, arguments in calls) + "<｜tool▁calls▁end｜>"),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜>", lambda calls: "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls) + "<｜tool▁calls▁end｜>"),
    "kimi": ("<|tool_calls_section_begin|>", lambda calls: "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>" for i, (name, arguments) in enumerate(calls))
        + "<|tool_calls_section_end|>"),
    "mistral": ("[TOOL_CALLS]", lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)),
    "mistral list": ("[TOOL_CALLS]", lambda calls:
        f"[TOOL_CALLS][{', '.join(_json(*call) for call in calls)}]"),
    "pythonic": ("", lambda calls: f"[{', '.join(_python(*call) for call in calls)}]"),
    "olmo3": ("<function_calls>", lambda calls: "<function_calls>\n" + "\n".join(
        _python(*call) for call in calls) + "\n</function_calls>"),
    "harmony": ("<|channel|>final", lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>" for name, arguments in calls)),
}  # fmt: skip

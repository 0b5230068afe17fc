"""The formats in which models write tool calls and reasoning, and which of them a model uses.

The format follows from the marks in the model's chat template. `--tool-call-parser` and
`--reasoning-parser` set the formats by name if the template does not tell; vLLM's names have the
same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.api.output_text import harmony
from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marked_calls import (
    DEEPSEEK_TAGS,
    GRANITE_CALL,
    MINIMAX_TAGS,
    PHI_CALL,
    PHI_CALL_END,
    QWEN_TAGS,
    SEED_TAGS,
    TOOL_CALL,
    TOOL_CALL_END,
    read_functions,
    read_python,
    read_tool_call,
)
from moonpool.api.output_text.marks import MarkSigns
from moonpool.api.output_text.named_calls import (
    DeepSeekMarks,
    KimiMarks,
    MistralMarks,
    read_deepseek,
    read_kimi,
    read_mistral,
)
from moonpool.api.output_text.reasoning import (
    ALL_TAGS,
    GRANITE,
    MISTRAL,
    SEED,
    THINK,
    ReasoningTags,
)
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.api.output_text.tagged_calls import FunctionTags

AUTO, NONE = "auto", "none"
Read = Callable[[TextSource, CallWriter, MarkSigns, str], Steps[bool]]
CallId = Callable[[str, int, str, str], str]
"""Makes the id of a call from the function's name, the call's number in the conversation, the id
that the model wrote, and a random text."""


def _random_id(name: str, number: int, own: str, drawn: str) -> str:
    return f"call_{drawn}"


def _kimi_id(name: str, number: int, own: str, drawn: str) -> str:
    """The chat template of Kimi K2 shows the ids to the model."""
    return own or f"functions.{name}:{number}"


def _mistral_id(name: str, number: int, own: str, drawn: str) -> str:
    """The chat templates of Mistral accept no other ids."""
    return own if len(own) == 9 and own.isalnum() else drawn[:9]


class CallFormat(NamedTuple):
    """A `CallFormat` is one format of tool calls. `opens`: the marks that begin calls; none if
    calls stand without marks."""

    name: str
    also: tuple[str, ...]  # vLLM's names
    template_marks: tuple[str, ...]  # chat templates of such models contain one of these marks
    opens: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # further marks
    read: Read | None = None
    make_id: CallId = _random_id

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.template_marks, *self.opens, *self.others)


def _functions_between(tags: FunctionTags, ends: dict[str, str]) -> Read:
    """Returns a reader of tagged calls between the marks that `ends` maps to their closing
    marks."""

    def read(source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str) -> Steps[bool]:
        end = next(end for begin, end in ends.items() if signs.of(begin) == mark)
        return (yield from read_functions(source, calls, signs, tags, end))

    return read


def _python_until(end: str) -> Read:
    def read(source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str) -> Steps[bool]:
        return (yield from read_python(source, calls, signs.of(end)))

    return read


_SEED = {"<seed:tool_call>": "</seed:tool_call>"}
_MINIMAX = {"<minimax:tool_call>": "</minimax:tool_call>"}
_DSML = {f"<｜DSML｜{name}>": f"</｜DSML｜{name}>" for name in ("function_calls", "tool_calls")}
HARMONY = CallFormat(
    "harmony",
    ("openai",),
    (f"{harmony.CHANNEL}analysis", f"{harmony.CHANNEL}final"),
    others=harmony.MARKS,
)
BARE = CallFormat("llama", ("llama3_json", "llama4_json", "pythonic", "llama4_pythonic"), ())
FORMATS = (
    HARMONY,
    CallFormat(
        "deepseek_v3",
        ("deepseek_v31",),
        (DeepSeekMarks.section, DeepSeekMarks.call),
        (DeepSeekMarks.section, DeepSeekMarks.call),
        DeepSeekMarks.all,
        read_deepseek,
    ),
    CallFormat(
        "deepseek_v32",
        ("deepseek_v4", "deepseek_v41"),
        ("｜DSML｜",),
        tuple(_DSML),
        (*_DSML.values(), *DEEPSEEK_TAGS.texts),
        _functions_between(DEEPSEEK_TAGS, _DSML),
    ),
    CallFormat(
        "kimi_k2",
        (),
        (KimiMarks.section,),
        (KimiMarks.section, KimiMarks.call),
        KimiMarks.all,
        read_kimi,
        _kimi_id,
    ),
    CallFormat(
        "mistral",
        (),
        (MistralMarks.calls,),
        (MistralMarks.calls,),
        MistralMarks.all,
        read_mistral,
        _mistral_id,
    ),
    CallFormat(
        "seed_oss",
        (),
        tuple(_SEED),
        tuple(_SEED),
        tuple(_SEED.values()),
        _functions_between(SEED_TAGS, _SEED),
    ),
    CallFormat(
        "minimax_m2",
        (),
        tuple(_MINIMAX),
        tuple(_MINIMAX),
        tuple(_MINIMAX.values()),
        _functions_between(MINIMAX_TAGS, _MINIMAX),
    ),
    CallFormat(
        "olmo3",
        (),
        ("<function_calls>",),
        ("<function_calls>",),
        ("</function_calls>",),
        _python_until("</function_calls>"),
    ),
    CallFormat(
        "hermes",
        (
            *("qwen3_json", "qwen3_coder", "qwen3_xml", "glm45", "glm47", "granite", "granite4"),
            *("ernie45", "phi4_mini_json", "mimo"),
        ),
        (TOOL_CALL, GRANITE_CALL, f"{PHI_CALL}["),
        (TOOL_CALL, GRANITE_CALL, PHI_CALL, QWEN_TAGS.function),
        (TOOL_CALL_END, PHI_CALL_END),
        read_tool_call,
    ),
    BARE,
)
_REASONING: dict[str, ReasoningTags] = {
    **dict.fromkeys(
        (
            *("think", "deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "glm45", "glm47"),
            *("kimi_k2", "ernie45", "olmo3", "minimax_m2", "mimo", "granite_thinking_parser"),
        ),
        THINK,
    ),
    "seed_oss": SEED,
    "mistral": MISTRAL,
    "granite": GRANITE,
}
_HARMONY_REASONING = ("harmony", "openai_gptoss")
CALL_PARSERS = tuple(name for form in FORMATS for name in (form.name, *form.also))
REASONING_PARSERS = (*_REASONING, *_HARMONY_REASONING)


class UnknownParserError(ValueError):
    """No format has this name; the message lists those that exist."""


def call_format(name: str, template: str) -> CallFormat | None:
    """Returns the format of calls by its name, or by the template, or None if calls are not read.

    Raises `UnknownParserError`.
    """
    if name == NONE:
        return None
    if name != AUTO:
        for form in FORMATS:
            if name in (form.name, *form.also):
                return form
        raise _unknown("--tool-call-parser", name, CALL_PARSERS)
    for form in FORMATS:
        if any(mark in template for mark in form.template_marks):
            return form
    return BARE


def reasoning_tags(name: str, template: str) -> ReasoningTags | None:
    """Returns the tags of reasoning by the name of their format, or by the template, or None if
    there are none. Harmony has no tags, because the headers of its messages name the channel.
    Raises `UnknownParserError`."""
    if name == NONE or name in _HARMONY_REASONING:
        return None
    if name != AUTO:
        found = _REASONING.get(name)
        if found is None:
            raise _unknown("--reasoning-parser", name, REASONING_PARSERS)
    else:
        found = next((tags for tags in ALL_TAGS if tags.in_template(template)), None)
    if found is not None and found.answer is not None and found.answer[0] not in template:
        found = found._replace(answer=None)
    return found


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises `UnknownParserError`."""
    call_format(tool_parser, "")
    reasoning_tags(reasoning_parser, "")


def _unknown(flag: str, name: str, names: Sequence[str]) -> UnknownParserError:
    known = ", ".join(dict.fromkeys((AUTO, NONE, *names)))
    return UnknownParserError(f"{flag} {name[:50]!r} is unknown; use one of {known}")

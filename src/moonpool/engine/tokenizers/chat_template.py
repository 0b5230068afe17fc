"""Chat templates: Jinja source that turns messages into the prompt format of a model.

The renderer is our own because importing transformers' AutoTokenizer takes 1.7 s, where Jinja and
the `tokenizers` library take 0.04 s. Tests compare its results with transformers. A template comes
from a model's folder and is untrusted: it runs in Jinja's sandbox. Clients cannot supply templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonpool.engine.tokenizer import ChatTemplateError

CONTINUATION_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""For models that continue text: the prompt joins all messages without separators.

So "The quick brown fox. The quick" continues with " brown fox.". The next turn's prompt begins with
this turn's prompt and answer, so the prefix cache hits.
"""

ROLES_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For checkpoints without a template."""

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class ChatTemplate:
    """One compiled template, and the special tokens it may use by name."""

    def __init__(
        self,
        source: str,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """`tool_source` is used for requests with tools. Raises `ChatTemplateError`."""
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else None
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template does not compile: {error}"
            ) from None
        self.knows_tools = tool_source is not None or "tools" in source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt for `messages`. `arguments` are further template variables from the client.

        Raises `ChatTemplateError`.
        """
        taken = _RESERVED.intersection(arguments) | self._special_tokens.keys() & arguments.keys()
        if taken:
            raise ChatTemplateError(f"a chat template argument may not be named {min(taken)!r}")
        if tools and not self.knows_tools:
            raise ChatTemplateError(
                "this model's chat template does not support tools; start the server with"
                " --chat-template FILE, or require the call by 'tool_choice'"
            )
        template = self._tool_template if tools and self._tool_template else self._template
        context = {
            **self._special_tokens,
            **arguments,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(context)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"the messages do not fit the chat template: {error}") from None
        except (ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; serving ignores it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without access to names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escapes of Jinja's own filter, which models do not expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)

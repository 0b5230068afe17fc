"""Chat templates: Jinja source that turns messages into the prompt format of a model.

The renderer is our own because importing transformers' AutoTokenizer takes 1.7 s, where Jinja and
the `tokenizers` library take 0.04 s. Tests compare its results with transformers. A template comes
from a model's folder and is untrusted: it runs in Jinja's sandbox, and nothing of it is computed
before it is rendered. A template may still take any time and memory: `api.body_process` renders
within limits. Clients cannot supply templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonpool.text.tokenizer import ChatTemplateError

CONTINUATION_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template for models that continue text: the prompt joins all messages without separators.

So "The quick brown fox. The quick" continues with " brown fox.". The next turn's prompt begins with
this turn's prompt and answer, so the prefix cache hits.
"""

ROLES_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for checkpoints without one."""

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


MAX_TEMPLATE_CHARS = 1 << 18
"""Ten times the longest known template."""
MAX_ERROR_CHARS = 500


class ChatTemplate:
    """One template, and the special tokens it may use by name. The template is compiled when it is
    needed."""

    def __init__(
        self,
        source: str,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """`tool_source` is used for requests with tools."""
        self._source = source
        self._tool_source = tool_source
        self._special_tokens = dict(special_tokens or {})
        self.knows_tools = tool_source is not None or "tools" in source

    def check(self) -> None:
        """Raises `ChatTemplateError` if it does not compile."""
        assert self._template is not None
        assert self._tool_template is not None

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compiled(self._source)

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        return _compiled(self._tool_source) if self._tool_source else self._template

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt for `messages`. `arguments` are further template variables from the client.

        Raises `ChatTemplateError`, and MemoryError for a template that needs more than there is.
        """
        taken = _RESERVED.intersection(arguments) | self._special_tokens.keys() & arguments.keys()
        if taken:
            raise ChatTemplateError(f"a chat template argument may not be named {min(taken)!r}")
        if tools and not self.knows_tools:
            raise ChatTemplateError(
                "this model's chat template does not support tools; start the server with"
                " --chat-template FILE, or require the call by 'tool_choice'"
            )
        template = self._tool_template if tools else self._template
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
        except MemoryError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            text = f"the messages do not fit the chat template: {_in_one_line(error)}"
            raise ChatTemplateError(text) from None
        except Exception as error:  # a template may raise any error
            raise ChatTemplateError(f"the chat template failed: {_in_one_line(error)}") from None


def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}"
            " are supported"
        )
    try:
        return _environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # Jinja's compiler, and Python's, have errors of many kinds
        text = f"the model's chat template does not compile: {_in_one_line(error)}"
        raise ChatTemplateError(text) from None


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error)[:MAX_ERROR_CHARS].split())
    return text or type(error).__name__


class _LateCode(jinja2.compiler.CodeGenerator):
    """Code that computes nothing while it is compiled.

    Jinja computes constant expressions then, even those of a branch that is never taken, and even
    without its optimizer: `{{ 'a' * 10**10 }}` takes 10 GB.
    """

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: Any, frame: Any) -> None:  # noqa: N802
        if not all(isinstance(option.value, jinja2.nodes.Const) for option in node.options):
            self.fail("'autoescape' needs true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


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
        optimized=False,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.code_generator_class = _LateCode
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


class WithChatTemplate:
    """The methods of a `Tokenizer` that its chat template performs."""

    _chat: ChatTemplate

    @property
    def knows_tools(self) -> bool:
        return self._chat.knows_tools

    def check_chat_template(self) -> None:
        self._chat.check()

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        /,  # positional only, so that a template argument may have any name
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        return self._chat.render(messages, add_generation_prompt, tools, template_arguments)

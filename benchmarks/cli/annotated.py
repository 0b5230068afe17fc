"""Options of a command from the parameters of its function.

A parameter `name: Annotated[TYPE, "help", ...] = default` is an option. An int is 1 or more, a
float is above 0, a tuple is an option to repeat, and a bool is a flag. After the help text may
follow the flag, if it is not the name, and a click type, if TYPE does not say enough.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from moonpool.cli.options import COUNT, POSITIVE

Model = Annotated[str, "Model: a built-in, or a Hugging Face folder or id."]
Seed = Annotated[int, "Seed of all random choices.", click.INT]
PeerPython = Annotated[str, "Python of a vLLM installation."]
Rounds = Annotated[int, "Measure each case this often, in turn."]
Repeats = Annotated[int, "Measure each case this often."]
KeptFile = Annotated[
    str | None,
    "Keep all figures in this file; a later command adds to it.",
    "--json",
    click.Path(dir_okay=False),
]

_CLICK_TYPES: dict[Any, Any] = {int: COUNT, float: POSITIVE, str: click.STRING}


def options(
    command: Callable[..., None], described: Callable[..., None] | None = None
) -> Callable[..., None]:
    """Adds to a command the options of its annotated parameters, in their order, or those of the
    parameters of another function."""
    described = described or command
    hints = get_type_hints(described, include_extras=True)
    for name, parameter in reversed(list(signature(described).parameters.items())):
        annotation = _without_none(hints[name])
        if get_origin(annotation) is Annotated:
            command = _option(name, annotation, parameter.default)(command)
    return command


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (UnionType, Union):
        return next(one for one in get_args(kind) if one is not NoneType)
    return kind


def _option(name: str, annotation: Any, default: Any) -> Callable[..., Any]:
    kind, text, *extras = get_args(annotation)
    kind = _without_none(kind)
    settings: dict[str, Any] = {"help": text}
    if default is Parameter.empty:
        settings["required"] = True
    elif default is not None and kind is not bool:
        settings |= {"default": default, "show_default": default not in ("", ())}
    if get_origin(kind) is tuple:
        settings["multiple"] = True
        kind = get_args(kind)[0]
    if kind is bool:
        settings["is_flag"] = True
    else:
        types = [extra for extra in extras if not isinstance(extra, str)]
        settings["type"] = types[0] if types else _click_type(kind)
    flags = [extra for extra in extras if isinstance(extra, str)] or ["--" + name.replace("_", "-")]
    return click.option(*flags, name, **settings)


def _click_type(kind: Any) -> Any:
    return click.Choice(get_args(kind)) if get_origin(kind) is Literal else _CLICK_TYPES[kind]

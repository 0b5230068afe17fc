"""Command-line options: options generated from the configuration, and options that several commands
share.

`ConfigFlags` makes one click option of each key of `Config` that a command names; type, limits,
flag and help come from the field itself. `SectionedCommand` lists them by config table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import inf, isnan
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import click
import msgspec

from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.inputs import read_text
from moonpool.cli.output import fail
from moonpool.cli.policy_type import POLICY_TYPES
from moonpool.config.parse import parse_config
from moonpool.config.schema import FieldSchema, Values, schema_of
from moonpool.config.tables import Config, ConfigError
from moonpool.plugins.objects import own_name

if TYPE_CHECKING:
    from click import ParamType as ParamType
else:

    class ParamType(click.ParamType):
        """Makes the type generic with releases of click in which it is not."""

        def __class_getitem__(cls, value_type: type) -> type:
            return cls


F = TypeVar("F", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(min=0.0, max=1.0, min_open=True, max_open=True)


class NumberRange(click.FloatRange):
    """A range of numbers that excludes NaN, which click's own range lets through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


FACTOR = NumberRange(min=0.01, max=100.0)


class JsonObject(ParamType[dict[str, Any]]):
    """A JSON object, as vLLM takes the settings of one feature."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            return msgspec.json.decode(value, type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"{value!r} is not a JSON object: {error}", param, ctx)


class _TokenShare(ParamType[Fraction]):
    name = "share"

    def convert(
        self, value: str | Fraction, param: click.Parameter | None, ctx: click.Context | None
    ) -> Fraction:
        if isinstance(value, Fraction):
            return value
        # imported here, because it imports all formats of traces
        from moonpool.trace.transform import parse_share

        try:
            return parse_share(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TOKEN_SHARE = _TokenShare()


class SloClassType(ParamType[dict[str, Any]]):
    """A class of requests and its service levels, such as `chat=2,0.1`."""

    name = "class"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        name, _, levels = value.rpartition("=")
        try:
            ttft_s, tbt_s = (float(text) for text in levels.split(","))
        except ValueError:
            ttft_s = tbt_s = 0.0
        if not name or not (0 < ttft_s < inf and 0 < tbt_s < inf):
            self.fail(f"{value!r} must be NAME=TTFT,TBT in seconds, such as chat=2,0.1", param, ctx)
        return {"name": name, "ttft_s": ttft_s, "tbt_s": tbt_s}


CONFIG_TYPES = {"slo.classes": SloClassType()}
"""Click types of the keys that are lists of structures, not of texts."""

TRACE_HELP = "Log or trace of requests: CSV, JSON lines, Mooncake, Azure or BurstGPT."


class _TraceFile(click.types.StringParamType):
    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return (
            "Give a log with the columns timestamp, prompt_tokens and completion_tokens, or make a"
            " trace: moonpool trace generate --requests 1000 -o trace.jsonl"
        )


trace_option = click.option(
    "--trace", "trace_file", required=True, type=_TraceFile(), metavar="FILE", help=TRACE_HELP
)
trace_format_option = click.option(
    "--trace-format",
    default="auto",
    show_default=True,
    metavar="[mooncake|bailian|azure|burstgpt|vidur|log|vllm|MODULE:NAME]",
    help="Format of the trace file; a parser of your own as MODULE:NAME.",
)
scale_option = click.option(
    "--scale-tokens",
    "scale",
    type=TOKEN_SHARE,
    default="1",
    show_default=True,
    help="Share of each prompt and answer to keep, such as 1/16.",
)
requests_option = click.option(
    "--requests", type=COUNT, help="Use only the first requests of the trace, at most this many."
)
speed_option = click.option(
    "--speed",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Replay the trace this many times faster.",
)
noise_option = click.option(
    "--noise",
    type=NumberRange(min=0, max=0.99),
    default=0.0,
    show_default=True,
    help="Largest share by which a step departs from its true cost.",
)
capped_answers_option = click.option(
    "--capped-answers",
    is_flag=True,
    help="Limit each answer to the length it has in the trace, as `replay` does.",
)
config_option = click.option(
    "--config", "config_file", type=click.Path(dir_okay=False), help="TOML file; flags override it."
)
catalogue_option = click.option(
    "--catalogue",
    "catalogue_file",
    type=click.Path(dir_okay=False),
    help="TOML file with more devices, model shapes and prices.",
)


def pem_options(flag: str, name: str, certificate: str, authority: str) -> Callable[[F], F]:
    """Returns a decorator that adds FLAG-certfile, -keyfile and -ca-certs, as NAMEcertfile,
    NAMEkeyfile and NAMEca_certs. `certificate` and `authority` are the help texts of the two
    options."""
    key = "Key of that certificate (PEM); in the certificate's file unless given."
    helps = {"certfile": certificate, "keyfile": key, "ca-certs": authority}

    def decorate(command: F) -> F:
        for end, text in reversed(helps.items()):
            names = f"{flag}-{end}", name + end.replace("-", "_")
            add = click.option(*names, default="", callback=not_empty, metavar="FILE", help=text)
            command = add(command)
        return command

    return decorate


def not_empty(context: click.Context, param: click.Parameter, value: str) -> str:
    """Ends the command if a protective option is given but empty, for example from an unset
    variable."""
    assert param.name is not None
    is_given = context.get_parameter_source(param.name) is not click.core.ParameterSource.DEFAULT
    if is_given and not value.strip():
        fail(f"{param.opts[0]} is given and empty: give a value, or leave it out")
    return value


json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file."
)
attainment_option = click.option(
    "--attainment",
    type=SHARE,
    default=0.9,
    show_default=True,
    help="Share of requests that must meet both SLOs; a rejected request does not.",
)
confidence_option = click.option(
    "--confidence",
    type=SHARE,
    default=0.95,
    show_default=True,
    help="Confidence at which the attainment must hold.",
)
seeds_option = click.option(
    "--seeds",
    type=click.IntRange(min=2, max=100),
    default=6,
    show_default=True,
    help="Simulate each case with at most this many seeds.",
)
first_seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="First seed; each draws stretches of the trace, and 0 keeps the trace as it is.",
)
processes_option = click.option(
    "--processes", type=COUNT, help="Processes that simulate; one per core unless given."
)

POLICY_KEYS = (
    "conductor.placement",
    "conductor.admission",
    "conductor.kvcache_balancing_threshold",
    "conductor.load_limit",
    "conductor.decode_prediction",
    "conductor.inline_prefill",
    "conductor.decode_wait",
    "conductor.inline_chunks",
    "conductor.prefetch",
    "conductor.programs",
    "conductor.replicate",
    "conductor.spare_copies_first",
    "conductor.max_attempts",
    "conductor.learning",
    "conductor.role_balance",
    "conductor.role_balance_window_s",
    "conductor.autoscale",
    "conductor.autoscale_load",
    "pool.ssd_admission",
    "pool.eviction",
    "pool.prefix_caching",
    "engine.batching",
)
"""Keys that decide, and so are the same in service and in a simulation."""

_CLICK_TYPES: dict[Any, Any] = {int: click.INT, float: click.FLOAT, str: click.STRING}


class ConfigOption(click.Option):
    """An option that overrides one key of the configuration; `table` is the key's table."""

    def __init__(self, *args: Any, table: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.table = table


class SectionedCommand(ScreenHelp):
    """A command whose full help lists the options of each config table in a section of its own."""

    def format_all_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                name = f"[{param.table}]" if isinstance(param, ConfigOption) else "Options"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class ConfigFlags:
    """The flags by which one command overrides the configuration.

    `keys` are names such as "pool.block_tokens". `types` and `helps` replace, for some keys, the
    click type and the help text that follow from the field.
    """

    def __init__(
        self,
        *keys: str,
        types: Mapping[str, click.ParamType[Any]] | None = None,
        helps: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = frozenset(keys)
        self._fields = tuple(schema_of(Config)[key] for key in keys)
        self._types = types or {}
        self._helps = helps or {}

    def options(self, defaults: Config, hidden: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Returns a decorator that adds the options; `defaults` are the values that help shows."""

        def decorate(command: F) -> F:
            for field in reversed(self._fields):
                command = self._option(field, defaults, field.name in hidden)(command)
            return command

        return decorate

    def _option(self, field: FieldSchema, defaults: Config, hidden: bool) -> Callable[[F], F]:
        text = self._helps.get(field.name, field.meta.description or "")
        default = getattr(getattr(defaults, field.table), field.key)
        settings: dict[str, Any] = {}
        flags = field.flag
        if field.kind is bool:
            flags, settings = f"{field.flag}/--no-{field.flag[2:]}", {"default": None}
        elif get_origin(field.kind) is tuple:
            settings = {"multiple": True, "type": self._types.get(field.name)}
            settings["type"] = settings["type"] or CONFIG_TYPES.get(field.name, click.STRING)
        else:
            types = {**POLICY_TYPES, **self._types}
            settings["type"] = types.get(field.name) or _click_type(field.kind)
            if default:
                shown = f"{default:g}" if isinstance(default, float) else default
                text = f"{text}  [default: {shown}]"
        metavar = (field.meta.extra or {}).get("metavar") or None
        return click.option(
            flags,
            cls=ConfigOption,
            table=field.table,
            help=text,
            metavar=metavar,
            hidden=hidden,
            **settings,
        )

    def overrides(self, flags: Mapping[str, Any]) -> Values:
        """Returns the values of the flags that were given; `flags` may hold others, too."""
        given: Values = {}
        for field in self._fields:
            value = flags.get(field.flag[2:].replace("-", "_"))
            if value is not None and value != ():
                given.setdefault(field.table, {})[field.key] = value
        return given


def read_config(
    config_file: str | None, overrides: Values, defaults: Values | None = None
) -> Config:
    """Lays the overrides over the file, and both over `defaults`. Ends the command, with one line
    for each mistake."""
    text = "" if config_file is None else read_text(config_file, "the config")
    try:
        return parse_config(text, overrides, defaults, own_name)
    except ConfigError as error:
        fail_config(error, text, config_file)


def fail_config(error: ConfigError, text: str, config_file: str | None) -> NoReturn:
    """Ends the command with a line for each problem. The line names the file if its `text` alone,
    without the flags, has the problem. Raises SystemExit."""
    of_file: tuple[str, ...] = ()
    try:
        parse_config(text)
    except ConfigError as own:
        of_file = own.problems
    fail(*(f"{config_file}: {one}" if one in of_file else one for one in error.problems))


def _click_type(kind: Any) -> Any:
    if get_origin(kind) is UnionType:  # the type of a struct, or None
        return JsonObject()
    return click.Choice(get_args(kind)) if get_origin(kind) is Literal else _CLICK_TYPES[kind]

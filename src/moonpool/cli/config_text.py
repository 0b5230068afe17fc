"""The configuration as text: TOML with comments, and the reference page of all keys."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from moonpool.cli.options import POLICY_KEYS
from moonpool.cli.policy_type import POLICY_TYPES
from moonpool.cli.serve import HEAD_FLAGS, SERVE_FLAGS
from moonpool.cli.simulate import SIMULATE_FLAGS
from moonpool.config.parse import toml_value
from moonpool.config.schema import FieldSchema, Values, schema_of
from moonpool.config.tables import Config

SECRETS = frozenset({"api.api_keys"})
_WIDTH = 88
VARIABLES = (
    ("MOONPOOL_API_KEY", "API keys of `serve` and `head`, separated by commas or spaces."),
    ("MOONPOOL_ADMIN_KEY", "The operator's key, which sees and steers the whole cluster."),
    ("MOONPOOL_CLUSTER_SECRET", "Secret of `head` and `worker`: 64 hexadecimal digits."),
    ("MOONPOOL_POOL", "Socket of `pool serve`, for vLLM and for `worker --vllm`."),
    ("VLLM_API_KEY", "API key of the vLLM servers that a worker drives."),
    ("OPENAI_API_KEY", "Key that commands send to a server, after the two above."),
    ("MOONPOOL_CLIENT_CERT", "File (PEM) that commands show to a server with `--ssl-ca-certs`."),
    ("MOONPOOL_LOG_LEVEL", "Least level of log lines: debug, info, warning or error."),
    ("MOONPOOL_LOG_FORMAT", "Form of log lines: text or json."),
)
"""Every variable of the environment that a command reads, with its meaning."""


def _tables() -> Iterator[tuple[str, list[FieldSchema]]]:
    for table, fields in groupby(schema_of(Config).values(), key=lambda field: field.table):
        yield table, list(fields)


def _line(field: FieldSchema, value: Any) -> str:
    is_unset = value is None or (field.protects and value == "")
    return f"# {field.key}: not set" if is_unset else f"{field.key} = {toml_value(value)}"


def _value(config: msgspec.Struct, field: FieldSchema) -> Any:
    return getattr(getattr(config, field.table), field.key)


# The values in effect


def effective_toml(
    config: Config,
    overrides: Values,
    in_file: Values,
    defaults: Values,
    environment: Mapping[str, str],
) -> str:
    """Returns all values as TOML, each with its origin. Secrets are counted and not shown."""
    lines: list[str] = []
    for table, fields in _tables():
        lines += ["", f"[{table}]"]
        pairs = [_effective(config, field, environment) for field in fields]
        width = max(len(text) for text in pairs)
        for field, text in zip(fields, pairs, strict=True):
            origin = _origin(field, _value(config, field), overrides, in_file, defaults)
            lines.append(f"{text:<{min(width, 50)}}  # {origin}")
    return "\n".join(lines[1:]) + "\n"


def _effective(config: Config, field: FieldSchema, environment: Mapping[str, str]) -> str:
    value = _value(config, field)
    if field.name not in SECRETS:
        return _line(field, value)
    more = len(environment.get("MOONPOOL_API_KEY", "").replace(",", " ").split())
    from_environment = f", and {more} of MOONPOOL_API_KEY" if more else ""
    return f"# {field.key}: {len(value)} (not shown){from_environment}"


def _origin(
    field: FieldSchema, value: Any, overrides: Values, in_file: Values, defaults: Values
) -> str:
    table, key = field.table, field.key
    if key in overrides.get(table, {}):
        return "flag"
    if key in in_file.get(table, {}):
        return "file"
    if value == defaults.get(table, {}).get(key, _value(Config(), field)):
        return "default"
    return "follows from other values"


# A new file


def new_file(config: Config) -> str:
    """Returns a TOML file in which every key stands as a comment, with its value in `config`."""
    lines = [
        "# Configuration of moonpool. Every value below is the default: remove the # before a key",
        "# to change it. `moonpool config check FILE` checks the file.",
    ]
    for table, fields in _tables():
        lines += ["", f"[{table}]"]
        for field in fields:
            lines += textwrap.wrap(
                f"{field.meta.description} {_allowed(field)}".strip(),
                _WIDTH,
                initial_indent="## ",
                subsequent_indent="## ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines.append(f"# {_line(field, _value(config, field))}")
    return "\n".join(lines) + "\n"


def _allowed(field: FieldSchema) -> str:
    """Returns the values that a key may have, as a sentence, or "" if its type says it all."""
    names = _choices(field)
    if names:
        return f"One of {', '.join(names)}."
    return f"Allowed: {field.limits}." if field.limits else ""


def _choices(field: FieldSchema) -> tuple[str, ...]:
    if get_origin(field.kind) is Literal:
        return tuple(str(each) for each in get_args(field.kind))
    policy = POLICY_TYPES.get(field.name)
    return () if policy is None else (*policy.built_in, "module:Class")


# The reference page


def reference_page() -> str:
    """Returns docs/config.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `moonpool config reference`; a test compares. Do not edit. -->",
        "",
        *_INTRODUCTION.strip().splitlines(),
        "",
        "## Variables of the environment",
        "",
        "| variable | meaning |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in VARIABLES),
    ]
    for table, fields in _tables():
        lines += ["", f"## [{table}]", *_about_table(table), ""]
        lines += ["| key | type | default | flag | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(field) for field in fields]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """
`serve`, `head`, `simulate` and `plan` read a TOML file with `--config FILE`. A flag overrides
the file, and the file overrides the default. An unknown key is an error that names the nearest
known one.

```sh
moonpool config init moonpool.toml        # a new file: every key with its meaning, as comments
moonpool config check moonpool.toml       # names, types and ranges, policies, keys and certificates
moonpool config show --config moonpool.toml --prefill 2   # all values, and where each comes from
moonpool config show --simulation         # the same for `moonpool simulate`
moonpool config schema                    # a JSON schema for editors
```

Flags stand in groups by table in `--help`. The policies have the same flags in service and in a
simulation; the column "flag" says which commands have one. Defaults are those of `serve`;
`simulate` has the paper's cluster.

**Secrets** stay out of files and command lines, which other users of a machine can see: keys
belong in the environment or in `--api-key-file`, which may hold `sha256:` and the digest instead
of a key.

**Shell completion** for bash, zsh and fish: add the line of your shell to its start-up file.

```text
eval "$(_MOONPOOL_COMPLETE=bash_source moonpool)"     # bash, ~/.bashrc
eval "$(_MOONPOOL_COMPLETE=zsh_source moonpool)"      # zsh, ~/.zshrc
_MOONPOOL_COMPLETE=fish_source moonpool | source      # fish, ~/.config/fish/config.fish
```
"""


def _about_table(table: str) -> list[str]:
    text = inspect.cleandoc(get_type_hints(Config)[table].__doc__ or "")
    return ["", text] if text else []


def _row(field: FieldSchema) -> str:
    text = f"{field.meta.description} {_allowed(field)}".strip()
    default = toml_value(_value(Config(), field))
    cells = (f"`{field.key}`", _type_name(field), f"`{default}`", _flag(field), text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type_name(field: FieldSchema) -> str:
    if get_origin(field.kind) is tuple:
        texts = get_args(field.kind)[0] is str
        return "list of texts" if texts else "list of tables"
    return {int: "integer", float: "number", bool: "true or false"}.get(field.kind, "text")


def _flag(field: FieldSchema) -> str:
    commands = [
        name
        for name, flags in (("serve", SERVE_FLAGS), ("head", HEAD_FLAGS))
        if field.name in flags.keys
    ]
    if field.name in SIMULATE_FLAGS.keys:
        commands.append("simulate")
    if not commands:
        return "-"
    where = "" if field.name in POLICY_KEYS else f" ({', '.join(commands)})"
    return f"`{field.flag}`{where}"

"""The type of options that name a policy: a built-in one, or "module:Class" of one's own."""

from __future__ import annotations

from typing import Any

import click

from moonpool.config.tables import POLICY_KEYS, is_own_policy
from moonpool.plugins.objects import BUILT_IN, installed_names, own_name


class PolicyType(click.types.StringParamType):
    """Accepts the built-in names, names from installed packages, which become module:Class, and any
    module:Class. Whether the class exists is checked later."""

    name = "policy"

    def __init__(self, key: str) -> None:
        self.key = key
        self.built_in = BUILT_IN[key]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.built_in)}|MODULE:CLASS]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = own_name(self.key, str(value))
        if name not in self.built_in and not is_own_policy(name):
            known = ", ".join(repr(one) for one in (*self.built_in, *installed_names(self.key)))
            self.fail(f"{value!r} is not one of {known}, nor MODULE:CLASS.", param, ctx)
        return name


POLICY_TYPES = {f"{table}.{key}": PolicyType(f"{table}.{key}") for table, key in POLICY_KEYS}

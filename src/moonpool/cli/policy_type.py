"""The type of options that name a policy: a built-in one, or "module:Class" of one's own."""

from __future__ import annotations

from typing import Any

import click

from moonpool.config import ADMISSIONS, EVICTIONS, PLACEMENTS, is_own_policy


class PolicyType(click.types.StringParamType):
    """Accepts the built-in names, and any module:Class; whether that exists is checked later."""

    name = "policy"

    def __init__(self, built_in: tuple[str, ...]) -> None:
        self.built_in = built_in

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.built_in)}|MODULE:CLASS]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.built_in and not is_own_policy(str(value)):
            known = ", ".join(repr(name) for name in self.built_in)
            self.fail(f"{value!r} is not one of {known}, nor MODULE:CLASS.", param, ctx)
        return str(value)


POLICY_TYPES = {
    "conductor.placement": PolicyType(PLACEMENTS),
    "conductor.admission": PolicyType(ADMISSIONS),
    "pool.eviction": PolicyType(EVICTIONS),
}

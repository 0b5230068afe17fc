"""The public traces that `moonpool trace download` knows: `public_traces.toml` as objects."""

from __future__ import annotations

import tomllib
from importlib import resources

import msgspec

from moonpool.types import Struct


class PublicTrace(Struct, frozen=True):
    """A trace to download. `sha256` is None where no reference sum is published."""

    file_name: str
    url: str
    licence: str
    sha256: str | None = None


def _read_public_traces() -> dict[str, PublicTrace]:
    text = resources.files(__package__).joinpath("public_traces.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, PublicTrace])


PUBLIC_TRACES = _read_public_traces()
"""The public traces by the name that `moonpool trace download` takes."""

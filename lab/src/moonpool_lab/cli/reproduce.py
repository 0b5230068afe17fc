"""`moonpool reproduce NAME`: the papers' tables and figures, from a checkout's `papers/`."""

from __future__ import annotations

import importlib

import click

from moonpool.cli.output import fail
from moonpool_lab.cli.checkout import find_checkout


def _load() -> click.Command:
    """Returns the command of `papers/`. Ends the process with one line if there is no checkout."""
    if find_checkout("papers") is None:
        fail("`moonpool reproduce` needs a checkout of moonpool: the package leaves `papers/` out")
    command: click.Command = importlib.import_module("papers.command").reproduce
    return command


reproduce = _load()

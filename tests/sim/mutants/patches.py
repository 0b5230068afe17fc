"""Helpers of the patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.scheduler.actions import Effects

Method = Callable[..., Any]


def nothing(original: Method) -> Method:
    """A method that does nothing."""
    return lambda *args, **kwargs: None


@contextmanager
def edited(effects: Effects, edit: Callable[[Any], Any]) -> Iterator[None]:
    """Passes each action that is added meanwhile through `edit`; None drops it."""
    start = len(effects._actions)
    yield
    kept = map(edit, effects._actions[start:])
    effects._actions[start:] = [action for action in kept if action is not None]

"""Helpers of the patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.scheduler.actions import ActionBuffer

Method = Callable[..., Any]


def nothing(original: Method) -> Method:
    """A method that does nothing."""
    return lambda *args, **kwargs: None


@contextmanager
def edited(actions_out: ActionBuffer, edit: Callable[[Any], Any]) -> Iterator[None]:
    """Passes each action that is added meanwhile through `edit`; None drops it."""
    start = len(actions_out._actions)
    yield
    kept = map(edit, actions_out._actions[start:])
    actions_out._actions[start:] = [action for action in kept if action is not None]

"""Holds helpers of the patches."""

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
    """Replaces each action that the block adds by the result of `edit`; None drops the action."""
    before = actions_out.take()
    yield
    kept = map(edit, actions_out.take())
    for action in [*before, *(action for action in kept if action is not None)]:
        actions_out.perform(action)

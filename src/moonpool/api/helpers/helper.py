"""A helper that outlives its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from moonpool.api.serving_backend import RequestRefused


class HelperLife(Protocol):
    """One process of a helper, from its start to its end."""

    @property
    def has_ended(self) -> bool: ...

    def end(self) -> None: ...


_Life = TypeVar("_Life", bound=HelperLife)


class Helper(Generic[_Life]):
    """One process at a time: another one takes its place when it has ended, until `close`."""

    def __init__(self, make: Callable[[], _Life], first: _Life | None = None) -> None:
        """`first`: a process that is up already."""
        self._make = make
        self._closed = False
        self.process = first

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.has_ended

    def current(self) -> _Life:
        """Returns the process, or a new one, not started yet, if it has ended. Raises
        `RequestRefused` after `close`."""
        if self._closed:
            text = "The server is stopping. Send the request again."
            raise RequestRefused(503, "server_stopping", text, 5.0)
        if self.process is None or self.process.has_ended:
            self.process = self._make()
        return self.process

    def close(self) -> None:
        self._closed = True
        if self.process is not None:
            self.process.end()

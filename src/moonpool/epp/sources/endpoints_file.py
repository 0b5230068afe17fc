"""Endpoints from a file in llm-d's form, YAML or JSON, which may change at any time.

It is looked at twice a second. A file that has changed is read when it has stayed the same from one
look to the next, so that nothing is read while it is written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from moonpool.discovery.listed_server import SourceError
from moonpool.epp.endpoint import Endpoint, EndpointError, Listing, read_endpoint
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.epp")

LOOK_S = 0.5
MAX_FILE_BYTES = 8 << 20
_Stamp = tuple[int, int, int]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Entry(msgspec.Struct):
    name: str
    address: str
    port: str | int
    namespace: str = "default"
    labels: dict[str, Any] = {}


class _Objective(msgspec.Struct):
    name: str
    priority: int = 0


class _File(msgspec.Struct):
    endpoints: list[Any] | None = None
    objectives: list[_Objective] | None = None


class EndpointsFile:
    """`objectives`, a list of names and priorities, is an addition to llm-d's form."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._said = ""

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """As `EndpointSource.follow`."""
        try:
            before = self._stamp()
            update(await asyncio.to_thread(self._read))
        except (OSError, ValueError) as error:
            raise SourceError(f"{self._path}: {_why(error)}") from None
        seen = before
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                now = self._stamp()
                if now != before and now == seen:
                    listing = await asyncio.to_thread(self._read)
                    if self._stamp() == now:
                        before = now
                        self._said = ""
                        update(listing)
                seen = now
            except (OSError, ValueError) as error:
                self._say(f"{self._path}: {_why(error)}; the endpoints stay as they were")

    def _stamp(self) -> _Stamp:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> Listing:
        """Raises OSError and ValueError."""
        with self._path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"it exceeds {MAX_FILE_BYTES} bytes")
        return self.read(raw)

    def read(self, raw: bytes) -> Listing:
        """Reads the text of such a file; what one entry lacks is logged, and the others count.
        Raises ValueError."""
        try:
            found = msgspec.convert(_plain(raw), _File)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"it is no YAML: {_why(error)}") from None
        except msgspec.ValidationError as error:
            raise ValueError(f"it has another form: {error}") from None
        except RecursionError:
            raise ValueError("it nests too deeply") from None
        endpoints: dict[str, Endpoint] = {}
        for given in found.endpoints or ():
            try:
                endpoint = _endpoint(given)
            except ValueError as error:
                self._say(f"{self._path}: {error}; it is left out")
                continue
            if endpoint is not None:
                endpoints[endpoint.name] = endpoint
        objectives = {each.name: each.priority for each in found.objectives or ()}
        return Listing(endpoints=tuple(endpoints.values()), objectives=objectives)

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text


def _plain(raw: bytes) -> Any:
    """The values of a YAML text: no objects, whatever its tags say. Raises YAMLError."""
    loader = _Loader(raw)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _endpoint(given: Any) -> Endpoint | None:
    """Raises ValueError."""
    try:
        entry = msgspec.convert(given, _Entry)
    except msgspec.ValidationError as error:
        raise EndpointError(f"an endpoint has another form: {error}") from None
    name = entry.name if entry.namespace == "default" else f"{entry.namespace}.{entry.name}"
    labels = {key: str(value) for key, value in entry.labels.items()}
    return read_endpoint(name, entry.address, entry.port, labels)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())

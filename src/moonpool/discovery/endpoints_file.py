"""Endpoints from a file in llm-d's form (YAML, of which JSON is a part), which may change at any
time.

    endpoints:
      - name: vllm-0
        address: 10.0.0.1
        port: "8000"
        labels: {llm-d.ai/role: prefill, moonpool.dev/kv-events-port: "5557"}
    objectives:
      - {name: premium, priority: 5}

llm-d requires name, IP address and port. Here the address may be a host name, too, and `objectives`
is an addition. The file is checked twice a second. A changed file is read once it has stayed the
same from one check to the next, so that it is not read while it is written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from moonpool.discovery.endpoint import (
    OLDER_LABELS,
    Endpoint,
    EndpointError,
    Listing,
    Notice,
    SourceError,
    has_older_labels,
    labelled_endpoint,
)
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.discovery")

LOOK_S = 0.5
MAX_FILE_BYTES = 8 << 20
_Stamp = tuple[int, int, int]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class EndpointsFile:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._notice = Notice(log)

    async def check(self) -> None:
        """Like `EndpointSource.check`."""
        await asyncio.to_thread(self._read)

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`."""
        before = self._stamp()
        update(await self._read_and_say())
        seen = before
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                now = self._stamp()
                if now != before and now == seen:
                    listing = await self._read_and_say()
                    if self._stamp() == now:
                        before = now
                        update(listing)
                seen = now
            except SourceError as error:
                self._notice.say(f"{error}; its servers stay as they were")

    async def _read_and_say(self) -> Listing:
        """Raises SourceError."""
        listing, problems = await asyncio.to_thread(self._read)
        self._notice.say("; ".join(f"{self._path}: {problem}" for problem in problems))
        return listing

    def _stamp(self) -> _Stamp:
        """Raises SourceError."""
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise SourceError(f"cannot read {self._path}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> tuple[Listing, list[str]]:
        """Raises SourceError."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise SourceError(f"cannot read {self._path}: {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise SourceError(f"{self._path} has more than {MAX_FILE_BYTES >> 20} MiB")
        try:
            return parse_endpoints(data)
        except SourceError as error:
            raise SourceError(f"{self._path}: {error}") from None


def parse_endpoints(data: bytes) -> tuple[Listing, list[str]]:
    """Parses the text of such a file. Also returns why entries are left out; a wrong entry leaves
    out no other entry. Raises SourceError."""
    found = _plain(data)
    entries = found.get("endpoints", ()) if isinstance(found, dict) else ()
    if not isinstance(found, dict) or "endpoints" not in found:
        raise SourceError("no list `endpoints:`")
    if entries is not None and not isinstance(entries, list):
        raise SourceError("`endpoints:` is no list")
    endpoints: dict[str, Endpoint] = {}
    problems: list[str] = []
    for number, entry in enumerate(entries or (), 1):
        try:
            endpoint = _endpoint(entry)
            if endpoint is None:
                continue
            if endpoint.name in endpoints:
                raise EndpointError(f"a second {endpoint.name!r}")
        except ValueError as error:  # also raised for a number with too many digits for str()
            problems.append(f"entry {number} is left out: {error}")
        else:
            endpoints[endpoint.name] = endpoint
    if any(isinstance(each, dict) and has_older_labels(_labels(each)) for each in entries or ()):
        problems.append(OLDER_LABELS)
    objectives = _objectives(found.get("objectives"), problems)
    return Listing(endpoints=tuple(endpoints.values()), objectives=objectives), problems


def _plain(data: bytes) -> Any:
    """The values of a YAML text: no objects, whatever its tags say. Raises SourceError."""
    try:
        loader = _Loader(data)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise SourceError(f"bad YAML{where}") from None
    except (ValueError, RecursionError):  # an invalid date, or lists nested too deeply
        raise SourceError("bad YAML") from None


def _endpoint(entry: Any) -> Endpoint | None:
    """Returns None for a kind of server that computes no text, such as an encoder. Raises
    EndpointError."""
    if not isinstance(entry, dict):
        raise EndpointError("not a mapping with name, address and port")
    name, address = entry.get("name"), entry.get("address")
    if not isinstance(name, str) or not isinstance(address, str):
        raise EndpointError("name and address must be texts")
    if entry.get("labels") and not isinstance(entry["labels"], dict):
        raise EndpointError("labels must be a mapping")
    namespace = str(entry.get("namespace") or "default")
    whole = name if namespace == "default" else f"{namespace}.{name}"
    return labelled_endpoint(whole, address, entry.get("port"), _labels(entry))


def _labels(entry: dict[Any, Any]) -> dict[Any, Any]:
    labels = entry.get("labels")
    return labels if isinstance(labels, dict) else {}


def _objectives(given: Any, problems: list[str]) -> dict[str, int]:
    """The priorities by name. Appends faults to `problems`."""
    found: dict[str, int] = {}
    for each in given if isinstance(given, list) else ():
        name, priority = (
            (each.get("name"), each.get("priority", 0)) if isinstance(each, dict) else (None, None)
        )
        if isinstance(name, str) and isinstance(priority, int):
            found[name] = priority
        else:
            problems.append("an objective is left out: it needs a name and a whole priority")
    if given is not None and not isinstance(given, list):
        problems.append("`objectives:` is no list")
    return found

"""The HTTP API of a Ray cluster's dashboard: what sources of servers need of it.

It is asked over HTTP, so that a front needs no Ray. It proves who it is as Ray's own programs do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from moonpool.discovery.endpoint import SourceError
from moonpool.http_client.client import ConnectionFailedError, HttpClient, header_lines
from moonpool.http_client.response import TooLargeError
from moonpool.types import MALFORMED

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
DEFAULT_URL = "http://127.0.0.1:8265"
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
MODE_VARIABLE = "RAY_AUTH_MODE"
ANSWER_S = 30.0
"""Ray's own programs wait this long, because its dashboard may be busy."""
MOST_ROWS = 10_000
"""Ray lists no more at a time."""
MAX_BYTES = 32 << 20

Row = Mapping[str, Any]


class RayApi:
    """`url`: "" is that of `RAY_API_SERVER_ADDRESS`, or of this machine."""

    def __init__(self, url: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """Raises SourceError."""
        self.url = (url or environment.get(ADDRESS_VARIABLE) or DEFAULT_URL).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise SourceError(
                f"{self.url!r} is no address of Ray's dashboard: use http://HOST:PORT"
            )
        self._environment = environment

    async def rows(self, kind: str, **wanted: str) -> list[Row]:
        """The rows of a table, such as "actors", whose columns have these values. Raises
        SourceError."""
        asked: list[tuple[str, str]] = [("limit", str(MOST_ROWS)), ("timeout", str(int(ANSWER_S)))]
        for column, value in wanted.items():
            asked += [("filter_keys", column), ("filter_predicates", "="), ("filter_values", value)]
        try:
            return read_rows(await self._get(f"/api/v0/{kind}", asked))
        except SourceError as error:
            raise SourceError(f"Ray's dashboard at {self.url}, its {kind}: {error}") from None

    async def described(self, path: str) -> Row:
        """The object at a path. Raises SourceError."""
        try:
            return read_object(await self._get(path))
        except SourceError as error:
            raise SourceError(f"Ray's dashboard at {self.url}: {error}") from None

    async def _get(self, path: str, asked: Sequence[tuple[str, str]] = ()) -> bytes:
        """Raises SourceError."""
        headers, target = self._headers(), f"{path}?{urlencode(asked)}" if asked else path
        try:
            http = HttpClient(self.url, connect_s=ANSWER_S)
            try:
                async with (
                    asyncio.timeout(ANSWER_S),
                    http.stream("GET", target, b"", headers) as found,
                ):
                    status, body = found.status, await found.read(MAX_BYTES)
            finally:
                http.close()
        except (ConnectionFailedError, TooLargeError, ValueError) as error:
            raise SourceError(_line(str(error))) from None
        except TimeoutError:
            raise SourceError(f"it did not answer within {ANSWER_S:g} s") from None
        if status != 200:
            raise SourceError(_refusal(status, body))
        return body

    def _headers(self) -> bytes:
        """The token is read for each call, because it may be replaced. Raises SourceError."""
        if self._environment.get(MODE_VARIABLE, "").lower() == "disabled":
            return b""
        token = self._environment.get(TOKEN_VARIABLE, "")
        named = self._environment.get(TOKEN_FILE_VARIABLE, "")
        file = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not token and (named or file.is_file()):
            try:
                token = file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read the token of Ray in {file}: {error}") from None
        try:
            return header_lines({"Authorization": f"Bearer {token}"}) if token else b""
        except ValueError:
            raise SourceError("the token of Ray has characters that no header can have") from None


def read_object(data: bytes) -> Row:
    """Raises SourceError."""
    try:
        found = msgspec.json.decode(data)
    except MALFORMED:
        found = None
    if not isinstance(found, dict):
        raise SourceError("it sent no JSON object")
    return found


def read_rows(data: bytes) -> list[Row]:
    """The rows of a table, as `ray list` gets them. Raises SourceError; also where some are left
    out."""
    found = read_object(data)
    try:
        if not found["result"]:
            raise SourceError(_line(str(found.get("msg", ""))))
        table = found["data"]["result"]
        rows, num_cut = table["result"], table["total"] - table["num_after_truncation"]
        num_cut += table["num_filtered"] - len(rows)
    except (KeyError, TypeError):
        raise SourceError("it sent another form than `ray list` reads") from None
    if num_cut:
        raise SourceError(f"it left out {num_cut}")
    return [row for row in rows if isinstance(row, dict)]


def _refusal(status: int, body: bytes) -> str:
    text = _line(body.decode(errors="replace"))
    if status in (401, 403):
        text = f"it wants another token: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}"
    return f"it responded with {status}: {text}"


def _line(text: str) -> str:
    return " ".join(text.split())[:200]

"""The HTTP API of a Ray cluster's dashboard: what sources of servers need of it.

It is asked over HTTP, so that a front needs no Ray. It proves who it is as Ray's own programs do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from moonpool.discovery.endpoint import SourceError
from moonpool.types import MALFORMED

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
DEFAULT_URL = "http://127.0.0.1:8265"
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
MODE_VARIABLE = "RAY_AUTH_MODE"
ANSWER_S = 30.0
"""As long as Ray's own programs wait: its dashboard may be busy."""
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
        try:
            async with (
                httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http,
                http.stream("GET", path, params=list(asked), headers=self._headers()) as response,
            ):
                body = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise SourceError(f"it sent more than {MAX_BYTES >> 20} MiB")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(_line(str(error)) or type(error).__name__) from None
        if response.status_code != 200:
            raise SourceError(_refusal(response.status_code, body))
        return body

    def _headers(self) -> dict[str, str]:
        """The token is read for each call, because it may be replaced. Raises SourceError."""
        if self._environment.get(MODE_VARIABLE, "").lower() == "disabled":
            return {}
        token = self._environment.get(TOKEN_VARIABLE, "")
        named = self._environment.get(TOKEN_FILE_VARIABLE, "")
        file = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not token and (named or file.is_file()):
            try:
                token = file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read the token of Ray in {file}: {error}") from None
        if not token.isascii() or not token.isprintable():
            raise SourceError("the token of Ray has characters that no header can have")
        return {"authorization": f"Bearer {token}"} if token else {}


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

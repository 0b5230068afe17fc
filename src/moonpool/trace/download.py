"""Downloads a public trace to a `.part` file, checks its sha256, then renames it.

An interrupted download resumes where it stopped, if the server supports that. The target is always
a complete file with the right sha256, if one is known.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from moonpool.trace.row import TraceError
from moonpool.types import Struct


class PublicTrace(Struct, frozen=True):
    """A trace to download. `sha256` is None if no reference checksum is published."""

    file_name: str
    url: str
    licence: str
    sha256: str | None = None


def _read_public_traces() -> dict[str, PublicTrace]:
    text = resources.files(__package__).joinpath("public_traces.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, PublicTrace])


PUBLIC_TRACES = _read_public_traces()
"""The public traces by the name that `moonpool trace download` takes."""


_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16
Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and the total, None if the server does not give it."""
Outcome = Literal["checked", "not checked", "there", "there, not checked"]


def download(trace: PublicTrace, folder: Path, progress: Progress) -> Outcome:
    """Downloads the file of a trace into `folder`. Raises TraceError."""
    target = folder / trace.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            return _present(trace, target)
        part = target.with_name(target.name + ".part")
        resumed = _fetch(trace, part, progress)
        found = _sha256(part)
        if resumed and trace.sha256 not in (None, found):
            part.unlink()  # the older part may belong to another version
            _fetch(trace, part, progress)
            found = _sha256(part)
        if trace.sha256 not in (None, found):
            part.unlink()
            raise TraceError(
                f"{trace.url} has sha256 {found[:16]}..., not the expected"
                f" {(trace.sha256 or '')[:16]}...; the file was changed or damaged and is not kept"
            )
        os.replace(part, target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error.strerror}") from None
    return "checked" if trace.sha256 else "not checked"


def _present(trace: PublicTrace, target: Path) -> Outcome:
    if trace.sha256 is None:
        return "there, not checked"
    found = _sha256(target)
    if found == trace.sha256:
        return "there"
    raise TraceError(
        f"{target} exists, but its sha256 is {found[:16]}..., not {trace.sha256[:16]}...;"
        " move it away and run this command again"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(trace: PublicTrace, part: Path, progress: Progress) -> bool:
    """Completes `part`. Returns whether it resumed an earlier download."""
    have_bytes = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have_bytes}-"} if have_bytes else {}
    headers["Accept-Encoding"] = "identity"  # a range must count bytes without compression
    try:
        with httpx.stream(
            "GET", trace.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        ) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return True  # `part` is complete, so the checksum decides
            if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                raise TraceError(
                    f"{trace.url} answered {response.status_code} {response.reason_phrase};"
                    " download the file by hand, or try again later"
                )
            resumes = _continues(response, have_bytes)
            _receive(response, part, have_bytes if resumes else 0, progress)
            return resumes
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TraceError(_no_network(trace.url, error)) from None


def _continues(response: httpx.Response, have_bytes: int) -> bool:
    if response.status_code != httpx.codes.PARTIAL_CONTENT:
        return False
    if response.headers.get("content-range", "").startswith(f"bytes {have_bytes}-"):
        return True
    raise TraceError(f"{response.url} sent another part of the file than requested; try again")


def _receive(response: httpx.Response, part: Path, have_bytes: int, progress: Progress) -> None:
    length = response.headers.get("content-length", "")
    total_bytes = have_bytes + int(length) if length.isdigit() else None
    with part.open("ab" if have_bytes else "wb") as file:
        progress(have_bytes, total_bytes)
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            file.write(chunk)
            have_bytes += len(chunk)
            progress(have_bytes, total_bytes)


def _no_network(url: str, error: Exception) -> str:
    host = urlsplit(url).hostname
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"cannot reach {host}: {error}; check the network or HTTPS_PROXY, and run this again"
    what = str(error) or type(error).__name__
    return f"the download from {host} was interrupted: {what}; run this again, it resumes there"

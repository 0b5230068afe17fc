"""The content of LoRA adapters, which is a part of the keys of their blocks.

vLLM loads an adapter's files when it is named first, again after it was evicted, and again by
`load_inplace`. vLLM does not tell which of two contents a step has used. So an adapter whose files
change while vLLM runs has no content from then on: its blocks are neither stored nor found.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool_engine.vllm.model_identity import (
    UnknownModelError,
    hash_folder,
    local_folder,
)

log = logging.getLogger("moonpool.vllm_connector")

Stamp = tuple[int, ...]


@dataclass(slots=True)
class _Adapter:
    content: str | None
    stamps: dict[Path, Stamp]
    """The stamps of the folder and its files, taken before the files were hashed."""


class Adapters:
    """The adapters that requests have named, by number and path. `settings`: the settings that
    change how vLLM applies an adapter."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._known: dict[tuple[int, str], _Adapter] = {}

    def content_of(self, request: Any) -> str | None:
        """Returns what the keys of an adapter's blocks contain. `request`: vLLM's LoRARequest.
        Returns None if the adapter's blocks have no keys."""
        name = (int(request.lora_int_id), str(request.lora_path))
        adapter = self._known.get(name)
        if adapter is None:
            adapter = self._known[name] = self._read(name[1])
        elif adapter.content is not None and _stamps(adapter.stamps) != adapter.stamps:
            adapter.content = None
            log.warning(
                "the files of the adapter %s have changed while vLLM runs: "
                "its blocks stay out of the KVCache pool until vLLM starts again",
                name[1],
            )
        return adapter.content

    def _read(self, path: str) -> _Adapter:
        try:
            folder = local_folder(path)
            stamps = _stamps([folder, *folder.rglob("*")])
            return _Adapter(f"{hash_folder(folder)} {self._settings}", stamps)
        except (UnknownModelError, OSError) as error:
            log.warning("blocks of an adapter stay out of the KVCache pool: %s", error)
            return _Adapter(None, {})


def _stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    found: dict[Path, Stamp] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            found[path] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found

"""Measures how long `serve` takes to start, and the memory of all its processes.

Seconds count from the start of the command. The model's file was read before, so it is in the
kernel's file cache. The first token is that of a short prompt, sent as soon as `/health` is 200.

Memory is the proportional set size (PSS: a page that n processes share counts 1/n in each), so the
sum is what the cluster takes. Memory is reported by mapping: KVCache, pages of the model's file,
and everything else.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from benchmarks.random_gguf import write_random_gguf
from benchmarks.suite.live.idle import cpu_s, family
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_lab.demo.client import CompletionClient
from moonpool_lab.demo.local_server import LocalServer

SHAPE, FORMAT = "qwen3-1.7b", "Q4_K"
PROMPT = list(range(16))
READ_BYTES = 16 << 20
AGE_S = 3600.0
Say = Callable[[str], None]
_MAPPING = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(?P<path>.*)\n(?P<fields>(?:\w+: .*\n)+)", re.M
)


def bench_start(
    model: str | None, flags: list[str], kv_tokens: int, repeats: int, say: Say
) -> dict[str, Any]:
    """Returns seconds and bytes of each start. Without `model`, it writes a model file first.

    The first start has no measured step times of an earlier one; at the other starts, these are an
    hour old. Raises BenchError.
    """
    with _model_file(model, say) as (name, path), tempfile.TemporaryDirectory() as cache:
        flags = [*flags, "--kv-tokens", str(kv_tokens)]
        starts = []
        for number in range(repeats + 1):
            if path is not None:
                _read(path)
            found = _start(name, path, flags, cache)
            starts.append(found)
            say(_line(number, found))
            _age(Path(cache))
        file_bytes = path.stat().st_size if path is not None else 0
    say(f"{file_bytes / 1e6:.0f} MB of file")
    keys = ("ready_s", "first_token_s", "cpu_s")
    return {
        "model": model or f"random {SHAPE} {FORMAT}",
        "flags": flags,
        "file_bytes": file_bytes,
        "first": starts[0],
        "again": {key: statistics.median(each[key] for each in starts[1:]) for key in keys}
        | {"memory_bytes": starts[-1]["memory_bytes"]},
        "starts": starts,
    }


@contextmanager
def _model_file(model: str | None, say: Say) -> Iterator[tuple[str, Path | None]]:
    if model is not None:
        yield model, gguf_file(model)
        return
    with tempfile.TemporaryDirectory(prefix="moonpool-start-") as folder:
        path = Path(folder) / f"{SHAPE}-{FORMAT}.gguf"
        say(f"writing {path}")
        write_random_gguf(SHAPE, FORMAT, path)
        yield str(path), path


def _start(name: str, path: Path | None, flags: list[str], cache: str) -> dict[str, Any]:
    began_s = time.monotonic()
    # An installed package has bytecode. An empty value lets the first start write it.
    environment = {"XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": ""}
    server = LocalServer([name, *flags], environment=environment)
    with server:
        ready_s = time.monotonic() - began_s
        first_token_s = ready_s + asyncio.run(_first_token(server.url))
        pids = family(server.pid)
        try:
            spent_s = sum(cpu_s(pid) for pid in pids)
            parts = [_memory(pid, path) for pid in pids]
        except OSError as error:
            raise BenchError(f"a process ended: {error}; {server.last_words()}") from None
        log = server.log_lines()
    if path is not None:  # the folder for temporary files says nothing
        log = [line.replace(f"{path.parent}/", "") for line in log]
    kinds = ("kvcache", "model_file", "other")
    memory = {kind: sum(part[kind] for part in parts) for kind in kinds}
    return {
        "ready_s": ready_s,
        "first_token_s": first_token_s,
        "cpu_s": spent_s,
        "memory_bytes": memory | {"sum": sum(memory.values())},
        "processes": [
            {"process": process, **part} for process, part in zip(pids.values(), parts, strict=True)
        ],
        "log": log,
    }


async def _first_token(url: str) -> float:
    client = CompletionClient(url)
    began_s = time.monotonic()
    answer = await client.complete(PROMPT, temperature=0, max_tokens=1, ignore_eos=True)
    seconds = time.monotonic() - began_s
    client.close()
    if answer.error or answer.generated_tokens != 1:
        raise BenchError(f"a request failed: {answer.status} {answer.error}")
    return seconds


def _memory(pid: int, path: Path | None) -> dict[str, int]:
    """Returns the proportional bytes of a process."""
    found = {"kvcache": 0, "model_file": 0, "other": 0}
    for mapping in _MAPPING.finditer(Path(f"/proc/{pid}/smaps").read_text()):
        size = re.search(r"^Pss: +(\d+) kB", mapping["fields"], re.M)
        if size is None:
            continue
        kind = "other"
        if mapping["path"].startswith("/memfd:moonpool-arena"):
            kind = "kvcache"
        elif path is not None and mapping["path"] == os.path.realpath(path):
            kind = "model_file"
        found[kind] += int(size[1]) * 1024
    return found


def _age(cache: Path) -> None:
    """Makes all files an hour older: young files may be taken for those of the same start."""
    for file in cache.rglob("*"):
        status = file.stat()
        os.utime(file, (status.st_atime, status.st_mtime - AGE_S))


def _read(path: Path) -> None:
    """Puts the file into the kernel's file cache."""
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass


def _line(number: int, found: dict[str, Any]) -> str:
    memory = {kind: size / 1e6 for kind, size in found["memory_bytes"].items()}
    return (
        f"start {number}: ready {found['ready_s']:.2f} s, first token"
        f" {found['first_token_s']:.2f} s, CPU {found['cpu_s']:.2f} s; {memory['sum']:.0f} MB:"
        f" KVCache {memory['kvcache']:.0f},"
        f" mapped model file {memory['model_file']:.0f}, other {memory['other']:.0f}"
    )

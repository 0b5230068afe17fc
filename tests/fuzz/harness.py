"""Feeds one reader with mutated samples, and reports its faults.

A finding is an exception that the reader does not document, more than a second of CPU time, or too
much memory during an input or after it. The death of the process is a finding, too, which
`campaign.py` reports.
"""

from __future__ import annotations

import mmap
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.json_fields import FieldMutator
from tests.fuzz.mutation import Mutator
from tests.fuzz.readers import Reader

HANG_S = 1.0
GIVE_UP_S = 20.0
CPU_TIME = " s of CPU"
INPUT_BYTES = 1 << 20
"""The largest input that is drawn; longer inputs are cut."""
MAX_INPUT_MEMORY = 256 << 20
MAX_GROWTH = 48 << 20
WARM_UP_SHARE = 0.3
MAX_FINDINGS = 10
BATCH_INPUTS = 64
"""The number of inputs after which the peak of memory is read, because a read takes longer than
most inputs."""


class _HangError(BaseException):
    """Is raised in a reader that takes GIVE_UP_S of CPU time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the lines of a finding, and the input that shows it."""

    reader: str
    what: str
    data: bytes


class LastInput:
    """A file that holds the present input, so that the input outlives the process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(INPUT_BYTES + 4))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), INPUT_BYTES + 4)

    def note(self, data: bytes) -> None:
        self._map[: 4 + len(data)] = len(data).to_bytes(4, "little") + data

    @staticmethod
    def read(path: Path) -> bytes:
        data = path.read_bytes()
        return data[4 : 4 + int.from_bytes(data[:4], "little")]


def fuzz(reader: Reader, num_inputs: int, seed: int, folder: Path) -> list[Finding]:
    """Runs `num_inputs` inputs. Stops after MAX_FINDINGS of different kinds."""
    made = FieldMutator if reader.by_field else Mutator
    mutator: Mutator | FieldMutator = made(reader.samples(), seed)
    for sample in reader.samples():
        # raises if the reader refuses a sample, because such a test would find nothing
        reader.read(sample, folder)
    last = LastInput(folder / "last-input")
    findings: list[Finding] = []
    kinds: set[str] = set()
    signal.signal(signal.SIGPROF, _on_hang)
    warm_bytes = 0
    warm_at = int(num_inputs * WARM_UP_SHARE) // BATCH_INPUTS * BATCH_INPUTS
    for first in range(0, num_inputs, BATCH_INPUTS):
        if first == warm_at:
            warm_bytes = _resident_bytes()
        count = min(BATCH_INPUTS, num_inputs - first)
        for data, what in _run_batch(reader, mutator, count, folder, last):
            kind = re.sub(r"\d|0x[0-9a-f]+|'.*?'", "", what)
            if what and kind not in kinds:  # reports one example of each kind of finding
                kinds.add(kind)
                findings.append(Finding(reader.name, what, data))
                if len(findings) == MAX_FINDINGS:
                    return findings
    grown = _resident_bytes() - warm_bytes
    if grown > MAX_GROWTH:
        what = f"resident memory grew by {grown >> 20} MiB over {num_inputs} inputs"
        findings.append(Finding(reader.name, what, b""))
    return findings


def _run_batch(
    reader: Reader, mutator: Mutator | FieldMutator, count: int, folder: Path, last: LastInput
) -> list[tuple[bytes, str]]:
    """Runs a batch of inputs, and returns each input with its fault, or with "" if it has none. A
    batch that took much memory runs again, input by input."""
    bytes_before = _forget_peak()
    found: list[tuple[bytes, str]] = []
    for _ in range(count):
        data = mutator.draw()[:INPUT_BYTES]
        last.note(data)
        found.append((data, _run(reader, data, folder)))
    if _peak_bytes() - bytes_before <= MAX_INPUT_MEMORY:
        return found
    return [(data, _memory_of(reader, data, folder, last) or what) for data, what in found]


def _memory_of(reader: Reader, data: bytes, folder: Path, last: LastInput) -> str:
    """Returns a line about the memory if the input takes too much, or an empty string."""
    bytes_before = _forget_peak()
    last.note(data)
    _run(reader, data, folder)
    taken_bytes = _peak_bytes() - bytes_before
    return f"{taken_bytes >> 20} MiB for one input" if taken_bytes > MAX_INPUT_MEMORY else ""


def _run(reader: Reader, data: bytes, folder: Path) -> str:
    """Runs one input; returns what the input does wrong. An input that takes too long counts only
    if the same happens again, because modules may have been imported the first time, or other
    processes may have used the core.
    """
    what = _run_once(reader, data, folder)
    return _run_once(reader, data, folder) if what.endswith(CPU_TIME) else what


def _run_once(reader: Reader, data: bytes, folder: Path) -> str:
    signal.setitimer(signal.ITIMER_PROF, GIVE_UP_S)
    started_s = time.process_time()
    try:
        reader.read(data, folder)
    except reader.errors as error:
        if "\n" in str(error).strip() and "Error" in type(error).__name__ and _is_ours(error):
            return f"an error of several lines: {error!r}"
    except _HangError:
        return f"no end within {GIVE_UP_S:g}{CPU_TIME}"
    except Exception:
        return traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    taken_s = time.process_time() - started_s
    return f"{taken_s:.1f}{CPU_TIME}" if taken_s > HANG_S else ""


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("moonpool")


def _on_hang(number: int, frame: FrameType | None) -> None:
    raise _HangError


def _forget_peak() -> int:
    """Sets the peak of resident memory to the present resident memory, and returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE

"""Runs a short slice of `python -m tests.fuzz`, with the same inputs in every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz_command
from tests.fuzz.campaign import run_apart
from tests.fuzz.figures import Counts, Figures
from tests.fuzz.harness import MAX_INPUT_MEMORY, Finding, fuzz
from tests.fuzz.readers import READERS, Reader

SLOW = {  # number of inputs in the quick run; the long run has ten times as many
    "model-files": 200,
    "gguf-keys": 60,
    "gguf": 60,
    "gguf-parts": 60,
    "checkpoint": 60,
    "ssd-folder": 150,
    "trace": 150,
    "http": 200,
}
SHORT_INPUTS = 400
LONG_INPUTS = 5_000
BY_NAME = {reader.name: reader for reader in READERS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_reader_ends_in_a_value_or_a_documented_error(name: str, tmp_path: Path) -> None:
    findings = fuzz(BY_NAME[name], SLOW.get(name, SHORT_INPUTS), 1, tmp_path)
    assert [finding.what for finding in findings] == []


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_many_inputs_of_a_reader(name: str) -> None:
    findings = run_apart(name, 10 * SLOW[name] if name in SLOW else LONG_INPUTS, 2)
    assert [finding.what for finding in findings] == []


def broken(kind: str, data: bytes, folder: Path) -> None:
    if data == b"x" * 80:
        return
    if kind == "exception":
        raise KeyError(data[0])
    if kind == "hang":
        while True:
            pass
    if kind == "memory":
        bytearray(MAX_INPUT_MEMORY * 2)[::4096] = b"x" * (MAX_INPUT_MEMORY * 2 // 4096)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("exception", "KeyError"), ("hang", "of CPU"), ("memory", "MiB for one input")],
)
def test_the_harness_finds(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hang":
        monkeypatch.setattr("tests.fuzz.harness.GIVE_UP_S", 0.3)
    reader = Reader(
        kind, lambda: [b"x" * 80], lambda data, folder: broken(kind, data, folder), (ValueError,)
    )
    findings = fuzz(reader, 3, 1, tmp_path)
    assert findings
    assert words in findings[0].what
    assert (tmp_path / "last-input").exists()


def test_counts_are_kept_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP API must answer mutated requests without a 5xx, and several runs must add their
    counts to one file. In the long run, the readers run in the processes of `run_apart`."""

    def run_here(reader: str, num_inputs: int, seed: int) -> list[Finding]:
        return fuzz(BY_NAME[reader], num_inputs, seed, tmp_path)

    monkeypatch.setattr(fuzz_command, "run_apart", run_here)
    path = tmp_path / "fuzz.json"
    line = ["fuzz", "--inputs", "60", "--reader", "http", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", line)
    assert [fuzz_command.main() for _ in range(2)] == [0, 0]
    counts = Figures.read(path).of("http")
    assert (counts.inputs, counts.num_findings) == (120, 0)


def test_each_kind_of_finding_is_counted_apart() -> None:
    texts = {
        "the process ended with status -11: ": "crashes",
        "no end within 20 s of CPU": "hangs",
        "1.2 s of CPU": "hangs",
        "Traceback (most recent call last):\n  KeyError": "tracebacks",
        "Traceback\n  ServerFailedError: status 500: x": "errors_5xx",
        "300 MiB for one input": "growth",
        "an error of several lines": "other",
    }
    for what, kind in texts.items():
        counts = Counts()
        counts.add(1, [Finding("x", what, b"")])
        assert getattr(counts, kind) == counts.num_findings == 1

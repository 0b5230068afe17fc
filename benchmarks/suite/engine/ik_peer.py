"""Runs ik_llama.cpp on one GGUF file by its own programs, `llama-bench` and `llama-batched-bench`.

Each timing runs in a separate process, which loads the file, repacks the weights for this machine
(`-rtr`), and warms up before it measures.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.errors import BenchError

NAME = "ik_llama.cpp"
PREFILL_PROGRAM, DECODE_PROGRAM = "llama-bench", "llama-batched-bench"
RUN_S = 900.0


class IkPrograms:
    """Times steps as `gguf_engines` names them: prefill_512, decode_1, decode_8."""

    name = NAME
    is_warm = True

    def __init__(self, folder: Path, path: Path, context: int, steps: int) -> None:
        """`folder` has the two programs. Raises BenchError."""
        for program in (PREFILL_PROGRAM, DECODE_PROGRAM):
            if not (folder / program).is_file():
                raise BenchError(
                    f"{folder} has no {program}: build ik_llama.cpp with the targets"
                    f" {PREFILL_PROGRAM} and {DECODE_PROGRAM}, and name its build/bin"
                )
        self._folder = folder
        self._path = path
        self._context = context
        self._steps = steps

    def time_s(self, job: str, threads: int) -> float:
        """Seconds of one step. Raises BenchError."""
        kind, _, number = job.rpartition("_")
        if kind == "prefill":
            return self._prefill_s(int(number), threads)
        return self._decode_s(int(number), threads)

    def _prefill_s(self, tokens: int, threads: int) -> float:
        said = self._run(
            PREFILL_PROGRAM,
            *("-p", tokens, "-n", 0, "-r", 1, "-t", threads, "-rtr", 1, "-o", "json"),
        )
        try:
            figures, _ = json.JSONDecoder().raw_decode(said[said.index("[\n") :])
            return float(figures[0]["avg_ns"]) / 1e9
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchError(f"{PREFILL_PROGRAM} printed no figures: {said[-200:]!r}") from None

    def _decode_s(self, batch: int, threads: int) -> float:
        said = self._run(
            DECODE_PROGRAM,
            *("-npp", self._context, "-ntg", self._steps, "-npl", batch, "-fa", "on", "-rtr"),
            *("-c", batch * (self._context + self._steps), "-t", threads),
        )
        for line in said.splitlines():
            cells = [cell.strip() for cell in line.partition("|")[2].split("|")]
            if len(cells) == 11 and cells[2] == str(batch):
                return batch / float(cells[7])  # cells[7] is the tokens per second of all sequences
        raise BenchError(f"{DECODE_PROGRAM} printed no figures: {said[-200:]!r}")

    def _run(self, program: str, *flags: str | int) -> str:
        """Runs the program, and returns what it printed on either stream. The program leaves a log
        file in the current folder."""
        paths = (self._folder.resolve() / program, "-m", self._path.resolve())
        command = [str(word) for word in (*paths, *flags)]
        try:
            with TemporaryDirectory() as folder:
                ended = subprocess.run(
                    command, capture_output=True, timeout=RUN_S, check=False, cwd=folder
                )
        except OSError as error:
            raise BenchError(f"{program} does not start: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise BenchError(f"{program} did not end within {RUN_S:.0f} s") from None
        if ended.returncode:
            lines = ended.stderr.decode(errors="replace").strip().splitlines()
            raise BenchError(f"{program} failed: {lines[-1] if lines else 'it said nothing'}")
        return (ended.stdout + b"\n" + ended.stderr).decode(errors="replace")

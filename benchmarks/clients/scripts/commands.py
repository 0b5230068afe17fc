"""Runs a client that is a command."""

import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def command(*words: str, **more) -> str:
    """Returns what the command printed. Raises RuntimeError with the last lines of its output if it
    fails."""
    program = BIN / words[0]
    line = [str(program) if program.exists() else words[0], *words[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, **more)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        last = [line for line in lines if "rror" in line][-2:] or lines[-2:]
        raise RuntimeError(f"status {done.returncode}: {' '.join(last)}")
    return done.stdout

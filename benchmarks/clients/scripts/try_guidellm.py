"""Tries guidellm against the server."""

import os
import tempfile

from commands import command
from probe import MODEL, URL, run

os.environ["HF_HOME"] = tempfile.mkdtemp()


def load():
    command(
        *("guidellm", "benchmark", "run", "--target", URL, "--model", MODEL),
        *("--profile", "concurrent", "--rate", "2", "--max-requests", "8"),
        *("--data", "prompt_tokens=32,output_tokens=8"),
        cwd=os.environ["HF_HOME"],
    )


run(load)

"""Tries aiperf against the server."""

import tempfile

from commands import command
from probe import MODEL, TOKENIZER, URL, run

LINE = (
    *("aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat"),
    *("--streaming", "--concurrency", "2", "--request-count", "8", "--tokenizer", TOKENIZER),
    *("--isl", "32", "--osl", "8", "--ui", "none"),
)


def load():
    command(*LINE, cwd=tempfile.mkdtemp())


run(load)

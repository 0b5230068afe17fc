"""Tries aider against the server: it edits a file of a folder by itself."""

import os
import tempfile

from commands import command
from probe import MODEL, QUESTION, URL, check, run

os.environ["OPENAI_API_BASE"] = f"{URL}/v1"
os.environ["OPENAI_API_KEY"] = "no-key"
FOLDER = tempfile.mkdtemp()
ASK = ("aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update")
ASK += ("--no-show-model-warnings", "--analytics-disable", "--no-pretty", "--map-tokens", "0")


def ask(*words):
    said = command(*ASK, *words, "--chat-mode", "ask", "--message", QUESTION, cwd=FOLDER)
    check("Tokens:" in said and "rror" not in said, said[-300:])


def chat():
    ask("--no-stream")


def stream():
    ask("--stream")


run(chat, stream)

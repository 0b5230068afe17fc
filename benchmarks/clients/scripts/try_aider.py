"""Tries aider against the server: its answers in a chat, and an edit of a file."""

import os
import subprocess
import tempfile
from pathlib import Path

from commands import command
from probe import KEY, MODEL, QUESTION, URL, check, run

FOLDER = Path(tempfile.mkdtemp())
os.environ["HOME"] = str(FOLDER)  # aider keeps its history and its settings there
ASK = ("aider", "--model", f"openai/{MODEL}", "--openai-api-base", f"{URL}/v1")
QUIET = ("--openai-api-key", KEY, "--yes-always", "--no-check-update", "--no-show-model-warnings")
PLAIN = ("--analytics-disable", "--no-pretty", "--map-tokens", "0", "--no-gitignore")


def asked(*words: str) -> str:
    said = command(*ASK, *QUIET, *PLAIN, *words, cwd=FOLDER, stdin=subprocess.DEVNULL)
    check("Tokens:" in said and "received." in said, said[-200:])
    return said


def chat():
    asked("--no-git", "--chat-mode", "ask", "--no-stream", "--message", QUESTION)


def stream():
    asked("--no-git", "--chat-mode", "ask", "--message", QUESTION)


def edits():
    (FOLDER / "hello.py").write_text('print("hello")\n')
    asked("--no-git", "--edit-format", "whole", "--message", "Print bye instead.", "hello.py")
    return "the file is offered; the model decides how it changes"


run(chat, stream, edits)

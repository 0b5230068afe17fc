"""Tries llm command against the server."""

import json
import os
import tempfile
from pathlib import Path

from commands import command
from probe import CITY_SCHEMA, MODEL, QUESTION, URL, check, run

os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
os.environ["LLM_OPENAI_KEY"] = os.environ["OPENAI_API_KEY"] = "no-key"
models = [
    {
        "model_id": "served",
        "model_name": MODEL,
        "api_base": f"{URL}/v1",
        "supports_schema": True,
        "supports_tools": True,
    }
]
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps(models))
ASK = ("llm", "-m", "served", "-o", "max_tokens", "48")


def chat():
    check(command(*ASK, "--no-stream", QUESTION).strip(), "no answer")


def stream():
    check(command(*ASK, QUESTION).strip(), "no answer")


def tools():
    command(*ASK, "-T", "llm_version", "What version of llm is this?")
    return "the tool is offered; the model decides whether it calls it"


def structured_output():
    found = command(*ASK, "--schema", json.dumps(CITY_SCHEMA), QUESTION)
    check("size" in json.loads(found), found)


run(chat, stream, tools, structured_output)

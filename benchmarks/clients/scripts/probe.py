"""Used by every script of this folder: tries features, and prints a line of JSON for each.

The folder's scripts run in environments of their own. The scripts call a client as its
documentation does, and set only the address, the key and the model.
"""

import json
import os
import sys
from collections.abc import Callable

URL = os.environ["MOONPOOL_URL"]
MODEL = os.environ["MOONPOOL_MODEL"]
TOKENIZER = os.environ.get("MOONPOOL_TOKENIZER", "")  # a folder that has tokenizer.json
KEY = "no-key"
QUESTION = "What is the capital of France?"
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": WEATHER_SCHEMA},
}
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "size": {"type": "string", "enum": ["small", "large"]},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


def run(*tries: Callable[[], str | None]) -> None:
    """Runs each try, which is named for its feature. A try that raises fails with its error. If a
    try returns words, they are added as a remark."""
    for attempt in tries:
        feature = attempt.__name__.replace("_", " ")
        try:
            remark = attempt() or ""
            works = True
        except Exception as error:  # the error is the result of the try
            remark, works = f"{type(error).__name__}: {error}", False
        line = {"feature": feature, "works": works, "remark": " ".join(remark.split())[:300]}
        print("RESULT " + json.dumps(line), file=sys.__stdout__, flush=True)


def check(condition: object, what: object) -> None:
    """Raises AssertionError that contains the unexpected value."""
    if not condition:
        raise AssertionError(f"unexpected answer: {str(what)[:200]}")

"""Tries curl against the server."""

import json

from commands import command
from probe import CITY_SCHEMA, MODEL, QUESTION, URL, WEATHER_TOOL, check, run

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}


def post(body, path="chat/completions"):
    return command(
        *("curl", "-sS", "--fail-with-body", "-H", "content-type: application/json"),
        *("-d", json.dumps(body), f"{URL}/v1/{path}"),
    )


def chat():
    check(json.loads(post(ASKED))["choices"][0]["message"]["content"], "no content")


def stream():
    check(post({**ASKED, "stream": True}).rstrip().endswith("data: [DONE]"), "no end")


def tools():
    found = post({**ASKED, "tools": [WEATHER_TOOL], "tool_choice": "required"})
    check(json.loads(found)["choices"][0]["message"]["tool_calls"], found)


def structured_output():
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA}}
    found = post({**ASKED, "response_format": form})
    check("size" in json.loads(json.loads(found)["choices"][0]["message"]["content"]), found)


def embeddings():
    found = json.loads(post({"model": MODEL, "input": ["a cat", "a kitten"]}, "embeddings"))
    check(len(found["data"]) == 2, found)


def logprobs():
    found = json.loads(post({**ASKED, "logprobs": True, "top_logprobs": 3}))
    check(found["choices"][0]["logprobs"]["content"], found)


run(chat, stream, tools, structured_output, embeddings, logprobs)

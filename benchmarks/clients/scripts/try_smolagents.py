"""Tries smolagents against the server."""

import json

from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, check, run
from smolagents import OpenAIModel, tool

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=48)
question = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: a city's name
    """
    return f"sunny in {city}"


def chat():
    check(model.generate(question).content, "no content")


def stream():
    check(len(list(model.generate_stream(question))) > 3, "few parts")


def tools():
    answer = model.generate(question, tools_to_call_from=[weather])
    check(answer.tool_calls, answer)


def structured_output():
    form = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    response_format = {"type": "json_schema", "json_schema": form}
    answer = model.generate(question, response_format=response_format)
    check("size" in json.loads(answer.content), answer)


def logprobs():
    answer = model.generate(question, logprobs=True, top_logprobs=3)
    check(answer.raw.choices[0].logprobs.content, answer.raw)


run(chat, stream, tools, structured_output, logprobs)

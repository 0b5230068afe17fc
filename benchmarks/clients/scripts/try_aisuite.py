"""Tries aisuite against the server."""

import json

import aisuite
from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, WEATHER_TOOL, check, run

client = aisuite.Client({"openai": {"base_url": f"{URL}/v1", "api_key": KEY}})
asked = {
    "model": f"openai:{MODEL}",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 48,
}


def chat():
    check(client.chat.completions.create(**asked).choices[0].message.content, "no content")


def stream():
    check(len(list(client.chat.completions.create(**asked, stream=True))) > 3, "few parts")


def tools():
    answer = client.chat.completions.create(**asked, tools=[WEATHER_TOOL], tool_choice="required")
    check(answer.choices[0].message.tool_calls, answer)


def structured_output():
    form = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": form}
    )
    check("size" in json.loads(answer.choices[0].message.content), answer)


def logprobs():
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    check(answer.choices[0].logprobs.content, answer)


run(chat, stream, tools, structured_output, logprobs)

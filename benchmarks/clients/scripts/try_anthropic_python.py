"""Tries anthropic python against the server."""

import json

import anthropic
from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, WEATHER_SCHEMA, check, run

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def chat():
    answer = client.messages.create(**asked, max_tokens=24, system="Answer in one word.")
    check(answer.content[0].text and answer.usage.output_tokens, answer)
    check(client.messages.count_tokens(**asked).input_tokens, "count_tokens")


def stream():
    with client.messages.stream(**asked, max_tokens=24) as events:
        check(len(list(events.text_stream)) > 3, "few parts")
        check(events.get_final_message().usage.output_tokens, "no usage")


def tools():
    weather = {"name": "weather", "description": "The weather", "input_schema": WEATHER_SCHEMA}
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(**asked, max_tokens=48, tools=[weather], tool_choice=choice)
    call = answer.content[-1]
    check(call.type == "tool_use" and "city" in call.input, answer)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turn = [
        *asked["messages"],
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(**asked | {"messages": turn}, max_tokens=16, tools=[weather])


def structured_output():
    form = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    answer = client.messages.create(**asked, max_tokens=48, output_config=form)
    check("size" in json.loads(answer.content[0].text), answer)


run(chat, stream, tools, structured_output)

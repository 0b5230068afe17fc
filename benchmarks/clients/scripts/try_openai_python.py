"""Tries openai python against the server."""

import json

import openai
from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, WEATHER_TOOL, check, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}


def chat():
    check(MODEL in [each.id for each in client.models.list()], "models.list")
    answer = client.chat.completions.create(**asked)
    check(answer.choices[0].message.content and answer.usage.total_tokens, answer)


def stream():
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    check(len(chunks) > 3 and chunks[-1].usage.completion_tokens, chunks)


def tools():
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            **asked, tools=[WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls
        check("city" in json.loads(call.function.arguments), answer)
    turn = [
        *asked["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    client.chat.completions.create(**asked | {"messages": turn}, tools=[WEATHER_TOOL])


def structured_output():
    form = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": form}
    )
    check("size" in json.loads(answer.choices[0].message.content), answer)


def embeddings():
    found = client.embeddings.create(model=MODEL, input=["a cat", "a kitten"]).data
    check(len(found) == 2 and len(found[0].embedding) > 100, found)


def logprobs():
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5)
    check(len(answer.choices[0].logprobs.content[0].top_logprobs) == 5, answer)


def completions():
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=4, logprobs=1)
    check(answer.choices[0].text, answer)


def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    check(answer.output_text, answer)
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16) as events:
        check(any(event.type == "response.output_text.delta" for event in events), "no delta")


def errors():
    try:
        client.chat.completions.create(**asked | {"temperature": 9})
    except openai.BadRequestError as error:
        check(error.param == "temperature", error)
    else:
        raise AssertionError("a temperature of 9 was taken")


run(chat, stream, tools, structured_output, embeddings, logprobs, completions, responses, errors)

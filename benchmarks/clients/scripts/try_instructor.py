"""Tries instructor against the server."""

import instructor
import openai
from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def structured_output():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(**asked, response_model=City, max_tokens=64)
        check(isinstance(found, City), found)


def tools():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    found = client.chat.completions.create(**asked, response_model=City, max_tokens=64)
    check(isinstance(found, City), found)


def stream():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partial = client.chat.completions.create_partial(**asked, response_model=City, max_tokens=64)
    check(list(partial)[-1].name, "no name")


def responses():
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=MODEL, input=QUESTION, response_model=City, max_output_tokens=64
    )
    check(isinstance(found, City), found)


run(stream, tools, structured_output, responses)

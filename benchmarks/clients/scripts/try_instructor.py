"""Tries instructor against the server."""

from typing import Literal

import instructor
import openai
from probe import KEY, MODEL, QUESTION, URL, check, run
from pydantic import BaseModel, ConfigDict

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


class ClosedCity(BaseModel):
    """A city. Instructor validates streamed answers strictly: it takes no text for an Enum."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome"]


class AnyObject(BaseModel):
    """JSON mode promises no more than an object, as the schema stands only in the prompt."""

    model_config = ConfigDict(extra="allow")


def chat():
    client = instructor.from_openai(plain)
    answer = client.chat.completions.create(**asked, response_model=None, max_tokens=64)
    check(answer.choices[0].message.content, answer)


def structured_output():
    for mode, form in (
        (instructor.Mode.JSON_SCHEMA, ClosedCity),
        (instructor.Mode.JSON, AnyObject),
    ):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(**asked, response_model=form, max_tokens=200)
        check(isinstance(found, form), found)


def tools():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    found = client.chat.completions.create(**asked, response_model=ClosedCity, max_tokens=64)
    check(isinstance(found, ClosedCity), found)


def stream():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partial = client.chat.completions.create_partial(
        **asked, response_model=ClosedCity, max_tokens=64
    )
    check(list(partial)[-1].name, "no name")


def responses():
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=MODEL, input=QUESTION, response_model=ClosedCity, max_output_tokens=64
    )
    check(isinstance(found, ClosedCity), found)


run(chat, stream, tools, structured_output, responses)

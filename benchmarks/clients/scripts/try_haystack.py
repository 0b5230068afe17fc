"""Tries haystack against the server."""

import json

from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, WEATHER_SCHEMA, check, run

address = {"api_base_url": f"{URL}/v1", "api_key": Secret.from_token(KEY), "model": MODEL}
question = [ChatMessage.from_user(QUESTION)]


def ask(settings, **more):
    generator = OpenAIChatGenerator(
        **address, generation_kwargs={"max_tokens": 48, **settings}, **more
    )
    return generator.run(question)["replies"][0]


def chat():
    check(ask({}).text, "no text")


def stream():
    parts = []
    ask({}, streaming_callback=parts.append)
    check(len(parts) > 3, parts)


def tools():
    weather = Tool("weather", "The weather", WEATHER_SCHEMA, lambda city: "sunny")
    reply = ask({"tool_choice": "required"}, tools=[weather])
    check("city" in reply.tool_calls[0].arguments, reply)


def structured_output():
    form = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    reply = ask({"response_format": {"type": "json_schema", "json_schema": form}})
    check("size" in json.loads(reply.text), reply)


def embeddings():
    check(len(OpenAITextEmbedder(**address).run("a cat")["embedding"]) > 100, "embedding")


def logprobs():
    reply = ask({"logprobs": True, "top_logprobs": 3})
    check(reply.meta["logprobs"]["content"], reply)


run(chat, stream, tools, structured_output, embeddings, logprobs)

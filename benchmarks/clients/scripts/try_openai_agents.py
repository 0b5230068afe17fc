"""Tries openai agents against the server."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from forms import City, Name
from probe import KEY, MODEL, QUESTION, URL, check, run

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
called = []
# all connections of the client belong to one loop
wait = asyncio.new_event_loop().run_until_complete


@function_tool
def weather(city: Name) -> str:
    """The weather."""
    called.append(city)
    return "sunny"


def agent(**more):
    settings = ModelSettings(max_tokens=48, **more.pop("settings", {}))
    arguments = {"name": "a", "model": model, "model_settings": settings}
    return Agent(**arguments | more)


def ask(one):
    return wait(Runner.run(one, QUESTION))


def chat():
    check(ask(agent()).final_output, "no output")


def stream():
    async def events():
        return [event async for event in Runner.run_streamed(agent(), QUESTION).stream_events()]

    check(len(wait(events())) > 3, "few events")


def tools():
    ask(agent(tools=[weather], settings={"tool_choice": "required", "parallel_tool_calls": False}))
    check(called, "not called")


def structured_output():
    check(isinstance(ask(agent(output_type=City)).final_output, City), "no city")


def logprobs():
    found = ask(agent(settings={"top_logprobs": 3}))
    check(found.raw_responses[0].output[0].content[0].logprobs, found.raw_responses)


def responses():
    other = OpenAIResponsesModel(model=MODEL, openai_client=client)
    answer = ask(agent(model=other, output_type=City))  # the client accepts no answer that is cut
    check(isinstance(answer.final_output, City), answer)


run(chat, stream, tools, structured_output, logprobs, responses)

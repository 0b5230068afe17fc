"""Tries pydantic ai against the server."""

from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
settings = {"max_tokens": 64}


def chat():
    check(Agent(model, model_settings=settings).run_sync(QUESTION).output, "no output")


def stream():
    found = Agent(model, model_settings=settings).run_stream_sync(QUESTION)
    check(len(list(found.stream_text(delta=True, debounce_by=None))) > 1, "few parts")


def tools():
    agent = Agent(model, output_type=ToolOutput(City), model_settings=settings)
    check(isinstance(agent.run_sync(QUESTION).output, City), "no city")


def structured_output():
    agent = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    check(isinstance(agent.run_sync(QUESTION).output, City), "no city")


def responses():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=settings)
    check(agent.run_sync(QUESTION).output, "no output")


run(chat, stream, tools, structured_output, responses)

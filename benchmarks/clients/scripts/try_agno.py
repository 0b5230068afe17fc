"""Tries Agno's agents against the server."""

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run

chats = OpenAILike(id=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=64)


def weather(city: str) -> str:
    """The weather.

    Args:
        city: a city's name
    """
    return f"sunny in {city}"


def chat():
    answer = Agent(model=chats).run(QUESTION)
    check(answer.status == "COMPLETED" and answer.content, answer)


def stream():
    parts = [event.content for event in Agent(model=chats).run(QUESTION, stream=True)]
    check(len([part for part in parts if part]) > 3, parts)


def tools():
    answer = Agent(model=chats, tools=[weather]).run("Call weather for Paris.")
    check(answer.status == "COMPLETED", answer)
    return "the tool is offered; the model decides whether it calls it"


def structured_output():
    answer = Agent(model=chats, output_schema=City).run(QUESTION)
    check(isinstance(answer.content, City), answer.content)


def responses():
    model = OpenAIResponses(id=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_output_tokens=48)
    answer = Agent(model=model).run(QUESTION)
    check(answer.status == "COMPLETED" and answer.content, answer)


def messages():
    model = Claude(id=MODEL, api_key=KEY, max_tokens=48, client_params={"base_url": URL})
    answer = Agent(model=model).run(QUESTION)
    check(answer.status == "COMPLETED" and answer.content, answer)


run(chat, stream, tools, structured_output, responses, messages)

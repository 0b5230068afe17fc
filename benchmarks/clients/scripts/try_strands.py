"""Tries Strands Agents against the server."""

from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

PLACE = {"base_url": f"{URL}/v1", "api_key": KEY}
quiet = {"callback_handler": None}


def of_chats():
    return OpenAIModel(client_args=PLACE, model_id=MODEL, params={"max_tokens": 400})


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: a city's name
    """
    return f"sunny in {city}"


def chat():
    check(str(Agent(model=of_chats(), **quiet)(QUESTION)).strip(), "no answer")


def stream():
    parts = []
    Agent(model=of_chats(), callback_handler=lambda **said: parts.append(said.get("data")))(
        QUESTION
    )
    check(len([part for part in parts if part]) > 3, parts)


def tools():
    check(Agent(model=of_chats(), tools=[weather], **quiet)("Call weather for Paris."), "no end")
    return "the tool is offered; the model decides whether it calls it"


def structured_output():
    found = Agent(model=of_chats(), **quiet)(QUESTION, structured_output_model=City)
    check(isinstance(found.structured_output, City), found)


def messages():
    place = {"base_url": URL, "api_key": KEY}
    model = AnthropicModel(client_args=place, model_id=MODEL, max_tokens=400)
    check(str(Agent(model=model, **quiet)(QUESTION)).strip(), "no answer")


run(chat, stream, tools, structured_output, messages)

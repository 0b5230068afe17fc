"""Tries chatlas against the server."""

import chatlas
from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run


def of_chats():
    session = chatlas.ChatOpenAICompletions(base_url=f"{URL}/v1", model=MODEL, api_key=KEY)
    session.set_model_params(max_tokens=64)
    return session


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat():
    check(str(of_chats().chat(QUESTION, echo="none")).strip(), "no answer")


def stream():
    check(len(list(of_chats().stream(QUESTION, echo="none"))) > 3, "few parts")


def tools():
    session = of_chats()
    session.register_tool(weather)
    session.chat("Call weather for Paris.", echo="none")  # raises what the server refuses
    return "the tool is offered; the model decides whether it calls it"


def structured_output():
    check(isinstance(of_chats().chat_structured(QUESTION, data_model=City), City), "no city")


def responses():
    session = chatlas.ChatOpenAI(base_url=f"{URL}/v1", model=MODEL, api_key=KEY)
    session.set_model_params(max_tokens=64)
    check(str(session.chat(QUESTION, echo="none")).strip(), "no answer")


def messages():
    more = {"base_url": URL}
    session = chatlas.ChatAnthropic(model=MODEL, api_key=KEY, max_tokens=48, kwargs=more)
    check(str(session.chat(QUESTION, echo="none")).strip(), "no answer")


run(chat, stream, tools, structured_output, responses, messages)

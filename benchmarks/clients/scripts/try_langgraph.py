"""Tries the agents of LangChain and LangGraph against the server."""

from forms import City
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from probe import KEY, MODEL, QUESTION, URL, check, run

ASKED = {"messages": [("user", QUESTION)]}
model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=64)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat():
    check(create_agent(model).invoke(ASKED)["messages"][-1].content, "no answer")


def stream():
    parts = list(create_agent(model).stream(ASKED, stream_mode="messages"))
    check(len(parts) > 3, parts)


def tools():
    asked = {"messages": [("user", "Call weather for Paris.")]}
    agent = create_agent(model, tools=[weather])
    check(agent.invoke(asked, {"recursion_limit": 8})["messages"], "no end")
    return "the tool is offered; the model decides whether it calls it"


def structured_output():
    agent = create_agent(model, response_format=ProviderStrategy(City))
    check(isinstance(agent.invoke(ASKED)["structured_response"], City), "no city")


def messages():
    other = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=48)
    check(create_agent(other).invoke(ASKED)["messages"][-1].content, "no answer")


run(chat, stream, tools, structured_output, messages)

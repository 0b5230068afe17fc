"""Tries smolagents against the server."""

from probe import KEY, MODEL, QUESTION, URL, check, run
from smolagents import OpenAIModel, tool

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=48)
question = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: a city's name
    """
    return f"sunny in {city}"


def chat():
    check(model.generate(question).content, "no content")


def stream():
    check(len(list(model.generate_stream(question))) > 3, "few parts")


def tools():
    answer = model.generate(question, tools_to_call_from=[weather])
    check(answer.tool_calls, answer)


run(chat, stream, tools)

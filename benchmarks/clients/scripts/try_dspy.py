"""Tries dspy against the server."""

from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition
from probe import KEY, MODEL, QUESTION, URL, check, run

ASKED = {"api_key": KEY, "max_tokens": 96, "cache": False}
REMARK = "with dspy.lm15.register_provider(..., supports=ModelSupport(response_schema=True, "
REMARK += "function_calling=True)); else DSPy sends an unknown model no schema and no tools"
access = AccessPolicy(provider="moonpool", base_url=f"{URL}/v1")
dspy.lm15.register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat()),
    supports=ModelSupport(response_schema=True, function_calling=True),
)
model = dspy.LM(f"moonpool/{MODEL}", **ASKED)


class Capital(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()


def chat():
    unregistered = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", **ASKED)
    check(unregistered(QUESTION)[0] and model(QUESTION)[0], "no answer")


def structured_output():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        check(dspy.Predict(Capital)(question=QUESTION).city in ("Paris", "Rome"), "no city")
    return REMARK


def stream():
    import asyncio

    async def parts():
        listener = dspy.streaming.StreamListener(signature_field_name="city")
        program = dspy.streamify(dspy.Predict(Capital), stream_listeners=[listener])
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            return [part async for part in program(question=QUESTION)]

    found = asyncio.run(parts())
    said = "".join(part.chunk for part in found if isinstance(part, dspy.streaming.StreamResponse))
    check(found[-1].city in said, found)
    return REMARK


class Call(dspy.Signature):
    """Answer by a call of a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def tools():
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather."""
        return f"sunny in {city}"

    forced = dspy.LM(f"moonpool/{MODEL}", **ASKED, tool_choice="required")
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=forced, adapter=adapter):
        found = dspy.Predict(Call)(question="The weather in Paris?", tools=[dspy.Tool(weather)])
    check(found.calls.tool_calls[0].args["city"] in ("Paris", "Rome"), found)
    return REMARK


def logprobs():
    answer = dspy.LM(f"moonpool/{MODEL}", **ASKED, logprobs=True)(QUESTION)
    check(answer[0]["logprobs"].content, answer)


def embeddings():
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY)
    check(len(embedder(["a cat", "a kitten"])) == 2, "embeddings")


run(chat, stream, tools, structured_output, embeddings, logprobs)

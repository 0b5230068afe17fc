"""Tries dspy against the server."""

from typing import Literal

import dspy
from probe import KEY, MODEL, QUESTION, URL, check, run

model = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, max_tokens=96, cache=False)


class Capital(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()


def chat():
    check(model(QUESTION)[0], "no answer")


def structured_output():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        check(dspy.Predict(Capital)(question=QUESTION).city in ("Paris", "Rome"), "no city")


def stream():
    import asyncio

    async def parts():
        listener = dspy.streaming.StreamListener(signature_field_name="city")
        program = dspy.streamify(dspy.Predict(Capital), stream_listeners=[listener])
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            return [part async for part in program(question=QUESTION)]

    check(asyncio.run(parts()), "no parts")


def embeddings():
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY)
    check(len(embedder(["a cat", "a kitten"])) == 2, "embeddings")


run(chat, stream, structured_output, embeddings)

"""Tries litellm against the server."""

import json

import litellm
from probe import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, WEATHER_TOOL, check, run

asked = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 48,
}


def chat():
    for prefix in ("hosted_vllm", "openai"):
        answer = litellm.completion(**asked | {"model": f"{prefix}/{MODEL}"})
        check(answer.choices[0].message.content, answer)


def stream():
    check(len(list(litellm.completion(**asked, stream=True))) > 3, "few parts")


def tools():
    answer = litellm.completion(
        **asked | {"max_tokens": 96}, tools=[WEATHER_TOOL], tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls
    check(calls and "city" in json.loads(calls[0].function.arguments), answer.choices)


def structured_output():
    form = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    answer = litellm.completion(
        **asked, response_format={"type": "json_schema", "json_schema": form}
    )
    check("size" in json.loads(answer.choices[0].message.content), answer)


def embeddings():
    found = litellm.embedding(
        model=f"hosted_vllm/{MODEL}", input=["a cat"], api_base=f"{URL}/v1", api_key=KEY
    )
    check(len(found.data) == 1, found)


def logprobs():
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=3)
    check(answer.choices[0].logprobs.content, answer)


def completions():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="1, 2,", api_base=f"{URL}/v1", api_key=KEY
    )
    check(answer.choices[0].text, answer)


def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        input=QUESTION,
        max_output_tokens=24,
        api_base=f"{URL}/v1",
        api_key=KEY,
    )
    check(answer.output[-1].content[0].text, answer)


run(chat, stream, tools, structured_output, embeddings, logprobs, completions, responses)

"""Tries langchain against the server."""

from forms import City
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from probe import KEY, MODEL, QUESTION, URL, check, run

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=48)


def chat():
    check(model.invoke(QUESTION).content, "no content")
    check(len(model.batch([QUESTION, "Hello"])) == 2, "batch")


def stream():
    check(len(list(model.stream(QUESTION))) > 3, "few parts")


def tools():
    found = model.bind_tools([City], tool_choice="any", strict=True).invoke(QUESTION)
    check(found.tool_calls and "name" in found.tool_calls[0]["args"], found)


def structured_output():
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(City, method=method).invoke(QUESTION)
        check(isinstance(found, City), found)


def embeddings():
    found = OpenAIEmbeddings(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    ).embed_documents(["a cat", "a kitten"])
    check(len(found) == 2, len(found))
    return "with check_embedding_ctx_length=False; else tiktoken downloads a vocabulary"


def logprobs():
    found = model.bind(logprobs=True, top_logprobs=3).invoke(QUESTION)
    check(len(found.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 3, found)


def responses():
    other = ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=24, use_responses_api=True
    )
    check(other.invoke(QUESTION).content, "no content")


run(chat, stream, tools, structured_output, embeddings, logprobs, responses)

"""Tries pydantic ai against the server."""

from forms import City
from probe import KEY, MODEL, QUESTION, URL, check, run
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
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


def embeddings():
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    check(len(embedder.embed_documents_sync(["a cat", "a kitten"]).embeddings) == 2, "embeddings")


def logprobs():
    asked = settings | {"openai_logprobs": True, "openai_top_logprobs": 3}
    answer = Agent(model, model_settings=asked).run_sync(QUESTION).all_messages()[-1]
    check((answer.provider_details or {}).get("logprobs"), answer)


def responses():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=settings)
    check(agent.run_sync(QUESTION).output, "no output")


run(chat, stream, tools, structured_output, embeddings, logprobs, responses)

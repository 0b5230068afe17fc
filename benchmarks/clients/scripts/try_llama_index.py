"""Tries llama index against the server."""

from forms import City, Name
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from probe import KEY, MODEL, QUESTION, URL, check, run

settings = {"api_base": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_tokens": 48}
model = OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True)


def weather(city: Name) -> str:
    """The weather."""
    return f"sunny in {city}"


def chat():
    check(model.chat([ChatMessage(role="user", content=QUESTION)]).message.content, "no content")
    check(OpenAILike(**settings).complete("1, 2, 3,").text, "no text")


def stream():
    parts = list(model.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    check(len(parts) > 3, parts)


def tools():
    tool = FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(answer)
    check("city" in call.tool_kwargs, call)


def structured_output():
    found = model.as_structured_llm(City).chat([ChatMessage(role="user", content=QUESTION)])
    check(isinstance(found.raw, City), found)


def logprobs():
    asked = OpenAILike(**settings, is_chat_model=True, logprobs=True, top_logprobs=3)
    answer = asked.chat([ChatMessage(role="user", content=QUESTION)])
    check(answer.logprobs, answer)


def embeddings():
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key=KEY)
    check(len(embedder.get_text_embedding_batch(["a cat", "a kitten"])) == 2, "embeddings")


run(chat, stream, tools, structured_output, embeddings, logprobs)

"""Tries semantic kernel against the server."""

import asyncio

import openai
from forms import City, Name
from probe import KEY, MODEL, QUESTION, URL, check, run
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextEmbedding,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
history = ChatHistory()
history.add_user_message(QUESTION)
# all connections of the client belong to one loop
wait = asyncio.new_event_loop().run_until_complete


class Weather:
    """A plugin."""

    called = False

    @kernel_function(name="weather", description="The weather")
    def weather(self, city: Name) -> str:
        self.called = True
        return "sunny"


def settings(max_tokens=64, **more):
    return OpenAIChatPromptExecutionSettings(max_tokens=max_tokens, **more)


def chat():
    answer = wait(model.get_chat_message_content(history, settings()))
    check(str(answer), answer)


def stream():
    async def parts():
        stream = model.get_streaming_chat_message_content(history, settings())
        return [part async for part in stream]

    check(len(wait(parts())) > 3, "few parts")


def tools():
    kernel, plugin = Kernel(), Weather()
    kernel.add_plugin(plugin, "weather")
    choice = FunctionChoiceBehavior.Required(auto_invoke=True)
    # the call must end by itself
    asked = settings(256, temperature=0.0, function_choice_behavior=choice)
    wait(model.get_chat_message_content(history, asked, kernel=kernel))
    check(plugin.called, "not called")


def structured_output():
    asked = settings(response_format=City)
    answer = wait(model.get_chat_message_content(history, asked))
    check(City.model_validate_json(str(answer)), answer)


def logprobs():
    asked = OpenAITextPromptExecutionSettings(max_tokens=16, logprobs=3)
    texts = OpenAITextCompletion(ai_model_id=MODEL, async_client=client)
    (answer,) = wait(texts.get_text_contents("1, 2,", asked))
    check(answer.metadata["logprobs"].tokens, answer.metadata)
    return "of completions; the settings of chats have no such field"


def embeddings():
    embedder = OpenAITextEmbedding(ai_model_id=MODEL, async_client=client)
    found = wait(embedder.generate_embeddings(["a cat", "a kitten"]))
    check(len(found) == 2, len(found))


run(chat, stream, tools, structured_output, embeddings, logprobs)

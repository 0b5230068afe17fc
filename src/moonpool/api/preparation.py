"""Makes a checked call, with its prompts as token ids, from the bytes of a body.

Work that depends only on the body and the model is done here, so that a separate process can do it
for large bodies (`body_pool`). `Preparer` itself knows no request, tenant or head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moonpool.api import messages
from moonpool.api.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeBody,
    check_unsupported,
    decode_body,
    missing_parameter,
)
from moonpool.api.errors import ApiError
from moonpool.api.models.forwarded_bodies import EstimatedPrompt, ForwardedReader
from moonpool.api.prompts import InThread, PromptReader, truncation_of
from moonpool.api.responses import ResponsesBody, as_chat, of_input
from moonpool.api.sampling import (
    check_logprobs,
    check_prompt_logprobs,
    check_range,
    check_ranges,
    check_token_ids,
    context_exceeded,
)
from moonpool.api.serving_backend import ApiOptions, ModelCard
from moonpool.api.structured_output import grammar_of
from moonpool.api.tools import Tools
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import PRIORITY_RANGE, BadWord

CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)
EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)
RESPONSES = msgspec.json.Decoder(ResponsesBody)
MESSAGES = msgspec.json.Decoder(messages.MessagesBody)
_COUNT_TOKENS = msgspec.json.Decoder(messages.CountTokensBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
MAX_INPUTS = 2048
"""Most texts of one call for embeddings, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked call with its prompts. `prompts` holds token ids, `echoes` the text before each
    output, `bad_words` the words of the body with their tokens.

    `grammar` constrains the output; "" means that nothing does. `grammar_field`: the field that
    asks for the grammar. `grammars.check` checks the grammar afterwards. `original` is the body of
    an API other than chat and completions, for its response. `num_tokens`: the tokens of the whole
    prompt of a forwarded call, whose `prompts` are estimates unless `is_exact`.
    """

    body: ChatBody | CompletionBody
    prompts: Sequence[tuple[int, ...]]
    grammar: str = ""
    tools: Tools | None = None
    echoes: Sequence[str] = ()
    original: Any = None
    grammar_field: str = ""
    bad_words: tuple[BadWord, ...] = ()
    num_tokens: int = 0
    is_exact: bool = False


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPTING = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_special_tokens",
        "add_generation_prompt",
        "system",
        "output_config",
        "input",
        "instructions",
    }
)
"""Fields of all APIs with messages from which the prompt is made."""
_OF_RESPONSES = frozenset({*_PROMPTING, "reasoning"})
"""The same of a body with `input`: vLLM ignores `reasoning` in other bodies."""


class _Tooled(msgspec.Struct):
    tools: list[Any] | None = None


_TOOLED = msgspec.json.Decoder(_Tooled)


class Preparer:
    """Reads the bodies of one model's calls. Each method raises `ApiError` for a body that is not
    valid."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        card: ModelCard,
        options: ApiOptions,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """`in_thread`: runs in a thread what would block an event loop for too long."""
        self._tokenizer = tokenizer
        self._in_thread = in_thread
        self._options = options
        self.use(card)

    def use(self, card: ModelCard) -> None:
        """Reads later bodies with this card, because the context may shrink when an instance
        joins."""
        self.card = card
        above = self._options.thread_above_chars
        prompts = PromptReader(self._tokenizer, card, above, self._in_thread)
        self._prompts = prompts
        self._names = self._options.accepted(card)
        self._forwarded = ForwardedReader(card, prompts.history_text, self._tokenizer.encode)

    async def chat(self, raw: bytes) -> PreparedCall:
        return await self._of_chat(decode_body(CHAT, raw))

    async def responses(self, raw: bytes) -> PreparedCall:
        """Reads a body of `/v1/responses`. Raises ApiError, which names the field of that body."""
        body = decode_body(RESPONSES, raw)
        try:
            return await self._of_chat(as_chat(body), body)
        except ApiError as error:
            raise of_input(error) from None

    async def messages(self, raw: bytes) -> PreparedCall:
        body = decode_body(MESSAGES, raw)
        return await self._of_chat(messages.as_chat(body), body)

    async def completion(self, raw: bytes) -> PreparedCall:
        body = decode_body(COMPLETION, raw)
        self._check(body)
        most_prompts = max(1, self._options.max_choices // (body.n or 1))
        prompts = await self._prompts.read_completion(body, most_prompts)
        echoes = self._prompts.echoes(body, prompts) if body.echo else ()
        field, grammar = await self._grammar(body, None)
        bad_words = self._prompts.bad_words(body.bad_words or ())
        return PreparedCall(
            body, prompts, grammar, echoes=echoes, grammar_field=field, bad_words=bad_words
        )

    async def count_tokens(self, raw: bytes) -> bytes:
        """Returns the response with the number of prompt tokens of a message."""
        chat = messages.as_chat(decode_body(_COUNT_TOKENS, raw))
        check_model(chat.model, self._names)
        self._check_known()
        Tools(chat)
        prompt = await self._prompts.read_chat(chat)
        return msgspec.json.encode({"input_tokens": len(prompt)})

    async def input_tokens(self, raw: bytes) -> bytes:
        """Like `count_tokens`, for a body of `/v1/responses`: errors name the fields of that
        API."""
        try:
            chat = as_chat(decode_body(RESPONSES, raw))
            check_model(chat.model, self._names)
            self._check_known()
            Tools(chat)
            prompt = await self._prompts.read_chat(chat)
        except ApiError as error:
            raise of_input(error) from None
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def embeddings(self, raw: bytes) -> PreparedCall:
        """Reads a body of `/v1/embeddings`, with at most MAX_INPUTS texts.

        Raises ApiError for a body that is not valid, for a text longer than the context, and (404)
        if the engine computes no embeddings.
        """
        body = decode_body(EMBEDDINGS, raw)
        check_model(body.model, self._names)
        size = self.card.embedding_size
        if not size:
            reason = self.card.no_embeddings
            text = f"This server does not compute embeddings{reason and f': {reason}'}."
            raise ApiError(text, status=404, code="unsupported_endpoint")
        check_range(body, "priority", *PRIORITY_RANGE)
        if body.dimensions is not None and not 1 <= body.dimensions <= size:
            text = f"'dimensions' must be between 1 and {size}, the size of the model's embeddings."
            raise ApiError(text, param="dimensions")
        prompt = CompletionBody(
            model=body.model, prompt=body.input, add_special_tokens=body.add_special_tokens
        )
        most = self.card.max_model_tokens
        if body.messages is None:
            param, truncation = "input", truncation_of(body, most, None)
            prompts = await self._prompts.read_texts(prompt, MAX_INPUTS, param, truncation)
        elif body.input is not None:
            raise ApiError("Use either 'input' or 'messages', not both.", param="messages")
        else:
            param, prompts = "messages", [await self._prompts.read_embedded_chat(body)]
        for prompt_ids in prompts:
            if len(prompt_ids) > most:
                raise context_exceeded(len(prompt_ids), most, param)
        return PreparedCall(prompt, prompts, "", original=body)

    async def forwarded(self, raw: bytes) -> PreparedCall:
        """Reads a body of an API with messages. Returns a call without prompts if no vLLM server
        has to answer the unchanged body."""
        found = _estimate(self._forwarded.media, raw)
        if found is None and self._is_parsed_there(raw):
            found = await self._of_text(raw)
        if found is None:
            return PreparedCall(CompletionBody(), ())
        return self._of_estimate(found)

    async def routed(self, raw: bytes) -> PreparedCall:
        """Reads a body of an API with messages that a vLLM server answers unchanged, whatever the
        body contains."""
        found = _estimate(self._forwarded.media, raw) or await self._of_text(raw)
        return self._of_estimate(found)

    def _is_parsed_there(self, raw: bytes) -> bool:
        """Whether the servers parse the parts of the answer that the client may expect."""
        parses = self.card.parses
        return (
            self.card.forwards_all
            or "reasoning" in parses
            or ("tools" in parses and bool(decode_body(_TOOLED, raw).tools))
        )

    async def _of_text(self, raw: bytes) -> EstimatedPrompt:
        """Returns the prompt as the head renders it, because the server uses the same template;
        content that the head does not understand is estimated."""
        given = _FIELDS.decode(raw)
        prompting = _OF_RESPONSES if "input" in given else _PROMPTING
        known = msgspec.json.encode({name: given[name] for name in given if name in prompting})
        reads: tuple[Callable[[], ChatBody], ...] = (
            lambda: decode_body(CHAT, known),
            lambda: messages.as_chat(decode_body(_COUNT_TOKENS, known)),
            lambda: as_chat(decode_body(RESPONSES, known)),
        )
        for read in reads if self.card.knows_tokens else ():
            try:
                body = read()
                Tools(body)
                if not self._tokenizer.knows_tools:
                    body.tools = None  # vLLM's template leaves tools out, too
                prompt = await self._prompts.read_chat(body)
            except ApiError:
                continue
            return self._forwarded.whole(raw, prompt)
        found = _estimate(self._forwarded.texts, raw)
        assert found is not None
        return found

    async def pooling(self, raw: bytes) -> PreparedCall:
        """Reads a body of an endpoint that a vLLM server has for models that generate nothing."""
        found = _estimate(self._forwarded.pooling, raw)
        assert found is not None
        return self._of_estimate(found)

    def _of_estimate(self, found: EstimatedPrompt) -> PreparedCall:
        check_model(found.body.model, self._names)
        body = CompletionBody(model=found.body.model)
        return PreparedCall(
            body,
            (found.token_ids,),
            original=found.body,
            num_tokens=found.num_tokens,
            is_exact=found.is_exact,
        )

    async def tokenize(self, raw: bytes) -> bytes:
        """Returns the response of `/tokenize`. Raises ApiError if the body has neither prompt nor
        messages."""
        body = decode_body(_TOKENIZE, raw)
        check_model(body.model, self._names)
        self._check_known()
        if body.messages is not None:
            text = self._prompts.chat_text(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                tools=body.tools,
                arguments=body.chat_template_kwargs or {},
            )
            add_special_tokens = bool(body.add_special_tokens)
        elif body.prompt is not None:
            text = body.prompt
            add_special_tokens = body.add_special_tokens is not False
        else:
            raise missing_parameter("prompt")
        tokens = await self._prompts.encode(text, add_special_tokens, "prompt")
        strings = None
        if body.return_token_strs:
            strings = [self._tokenizer.token_name(token_id) for token_id in tokens]
        answer = {
            "count": len(tokens),
            "max_model_len": self.card.max_model_tokens,
            "tokens": tokens,
            "token_strs": strings,
        }
        return msgspec.json.encode(answer)

    async def detokenize(self, raw: bytes) -> bytes:
        """Returns the response of `/detokenize`. Raises ApiError for token ids that are absent or
        out of the vocabulary."""
        body = decode_body(_DETOKENIZE, raw)
        check_model(body.model, self._names)
        self._check_known()
        if body.tokens is None:
            raise missing_parameter("tokens")
        check_token_ids(body.tokens, self.card.vocab_size, "tokens")
        text = self._tokenizer.decode(body.tokens, skip_special_tokens=False)
        return msgspec.json.encode({"prompt": text})

    async def _of_chat(self, body: ChatBody, original: Any = None) -> PreparedCall:
        self._check(body)
        tools = Tools(body)
        prompt = await self._prompts.read_chat(body)
        field, grammar = await self._grammar(body, tools)
        return PreparedCall(
            body,
            [prompt],
            grammar,
            tools,
            echoes=_continued(body),
            original=original,
            grammar_field=field,
            bad_words=self._prompts.bad_words(body.bad_words or ()),
        )

    def _check_known(self) -> None:
        """Raises ApiError (404) if the tokens of the model are unknown."""
        if not self.card.knows_tokens:
            text = f"The tokenizer of the model '{self.card.model_id}' is not known here."
            raise ApiError(text, status=404, code="unsupported_endpoint")

    def _check(self, body: ChatBody | CompletionBody) -> None:
        check_model(body.model, self._names)
        check_unsupported(body)
        check_ranges(body)
        check_logprobs(body, self._options.max_logprobs)
        check_prompt_logprobs(body, self._options.max_logprobs, self.card.scores_prompts)
        if body.stream_options is not None and not body.stream:
            text = "'stream_options' is only allowed when 'stream' is true."
            raise ApiError(text, param="stream_options")
        if (body.n or 1) > self._options.max_choices:
            text = f"'n' must be at most {self._options.max_choices} on this server."
            raise ApiError(text, param="n")

    async def _grammar(
        self, body: ChatBody | CompletionBody, tools: Tools | None
    ) -> tuple[str, str]:
        """Returns the field that constrains the output, and the grammar; both are empty if no field
        does."""
        must_call = tools.schema() if tools is not None and tools.must_call else None
        if must_call is None and not body.has_structured_output:
            return "", ""
        can_end = bool(self.card.eos_token_ids)
        found: tuple[str, str] = await self._in_thread(grammar_of, body, can_end, must_call)
        return found


def _continued(body: ChatBody) -> Sequence[str]:
    """Returns the text that vLLM's `echo` puts before the output: the last message, if the
    assistant wrote it."""
    last = (body.messages or [{}])[-1]
    content = last.get("content")
    if not body.echo or last.get("role") != "assistant" or not isinstance(content, str):
        return ()
    return (content,)


def _estimate(
    read: Callable[[bytes], EstimatedPrompt | None], raw: bytes
) -> EstimatedPrompt | None:
    try:
        return read(raw)
    except RecursionError:
        text = "The request body is nested too deeply. Use fewer levels."
        raise ApiError(text, code="invalid_json") from None


def check_model(name: str | None, served_names: Sequence[str]) -> None:
    """Raises ApiError (404) for a model that this server does not have; None means its own
    model."""
    if name is not None and name not in served_names:
        raise ApiError(
            f"The model '{name[:200]}' does not exist. This server has {', '.join(served_names)}.",
            status=404,
            param="model",
            code="model_not_found",
        )

"""One choice: the output for one prompt as it grows.

This class owns the steps between the head's tokens and the client's text: unfinished characters,
stop strings, counts, and the finish reason. The JSON is written by other modules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from moonpool.api.connection.kept_stream import Delivered, KeptStream
from moonpool.api.connection.poison import marked
from moonpool.api.output_text.said import Said, ToolCallDelta, plain
from moonpool.api.output_text.source import OutputReader
from moonpool.api.output_text.text_offsets import TextOffsets
from moonpool.api.sampling import Ending
from moonpool.api.serving_backend import ModelBackend, Output, RequestRefused
from moonpool.api.stop_strings import StopMatcher
from moonpool.api.structured_output import check_satisfied
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import FinishReason, Request, Token, TokenLogprobs

NO_OUTPUT = Output()
NOTHING_SAID = Said()
REPLAYED_PER_TURN = 64
"""Most known increments that are sent in a row before other calls get their turn."""


class Delta(NamedTuple):
    """The text that one increment added to a choice, which may be empty, and its tokens."""

    choice: Choice
    text: str
    tokens: Sequence[Token]
    # finish reason of this increment; the choice itself may already be further
    finish_reason: FinishReason | None
    calls: Sequence[ToolCallDelta] = ()
    output: Output = NO_OUTPUT  # the output from which the increment was made
    reasoning: str = ""  # reasoning before the text
    parts: Sequence[Said] = ()  # all parts in their order, with the tokens of each part

    def in_order(self) -> Sequence[Said]:
        """Returns the parts in the order of the output."""
        return self.parts or (Said(self.text, self.calls, self.reasoning, self.tokens),)


Take = Callable[[Delta], Awaitable[None]]
"""Sends an increment to the client. The next increment is awaited afterwards."""


class Choice:
    """`run()` runs the request; the other attributes describe its progress."""

    def __init__(
        self,
        index: int,
        request: Request,
        ending: Ending,
        tokenizer: Tokenizer,
        reader: OutputReader | None = None,
        shown: Mapping[int, str] | None = None,
    ):
        """`reader` tells reasoning and tool calls from the text. `shown`: the texts of special
        tokens that the reader needs."""
        self.index = index
        self.request = request
        self.echo: str | None = None  # the prompt's text, if the client wants it before the output
        # whether the client asked for no tokens, so that the engine's one token is hidden
        self.hide_output = False
        # logprobs of the prompt, from the second token on
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.num_tokens = 0
        self.reasoning_tokens = 0  # tokens of the output whose text is reasoning
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.timings_s: dict[str, float] | None = None
        self.delivered: list[int] | None = None  # tokens that the client has from another head
        self.hide_reasoning = False
        self.one_by_one = False  # whether each token is a separate increment
        self.has_tools = False  # whether tool calls are read
        self._reader = reader
        self._unsaid: list[Token] = []  # tokens whose text the reader holds back
        self._called = False
        self.answer_grammar = ""  # grammar that the answer after the reasoning must satisfy
        self._raw: list[str] = []  # texts of a structured output
        self._ending = ending
        self._tokenizer = tokenizer
        skips = ending.skip_special_tokens
        self._text_stream = tokenizer.stream(skips, shown) if shown else tokenizer.stream(skips)
        self._stops = StopMatcher(ending.stops, ending.include_stop) if ending.stops else None

    async def run(self, backend: ModelBackend, take: Take) -> None:
        """Passes each increment to `take` until the output ends. An error in `take`, or
        cancellation, aborts the request.

        Raises `RequestRefused`, and RuntimeError if the outputs stop without a finish reason.
        """
        delivered = None if self.delivered is None else tuple(self.delivered)
        outputs = backend.submit(self.request, delivered)
        try:
            async for output in outputs:
                for piece in _pieces(output) if self.one_by_one else (output,):
                    await take(await self._judged(piece, backend))
                    if self.finish_reason is not None:
                        return
        finally:
            close = getattr(outputs, "aclose", None)
            if close is None:
                backend.abort(self.request.request_id)
            else:
                await close()
        raise RuntimeError(f"request {self.request.request_id} ended without a finish reason")

    async def replay(self, output: Output) -> Delta:
        """Takes an output that the client has from another head."""
        delta = self._delta(output)
        if self.answer_grammar:
            await self._check_structure()
        assert self.delivered is not None
        self.delivered.extend([token.token_id for token in output.tokens])
        return delta

    async def _judged(self, output: Output, backend: ModelBackend) -> Delta:
        """Converts an output to text, and tells the head if the answer ends earlier than the engine
        knows: at a stop string, or because it is invalid. This does not wait for a client that
        reads slowly."""
        request_id = self.request.request_id
        try:
            delta = self._delta(output)
            if self.answer_grammar:
                await self._check_structure()
        except RequestRefused as refused:
            backend.abort(request_id, refused.refusal.reason)
            refused.is_counted = True
            raise
        if self.finish_reason is not None and isinstance(self.stop_reason, str):
            timings_s = backend.finish(request_id, self.finish_reason, self.num_tokens)
            self.timings_s = timings_s or self.timings_s
        return delta

    def _delta(self, output: Output) -> Delta:
        texts: list[str] = []
        delta = self._take(output, texts)
        if self.answer_grammar:
            self._raw.append(delta.text)
        if self._reader is not None:
            delta = self._read(delta, texts, self._reader)
        return delta

    @property
    def finish_word(self) -> str | None:
        """Returns `finish_reason` in OpenAI's terms, or None before the end. A call that a stop
        string has cut does not count."""
        if self.finish_reason is not FinishReason.STOP or not self._called:
            return self.finish_reason
        is_cut = self._is_cut and self._reader is not None and self._reader.is_in_call
        return self.finish_reason if is_cut else "tool_calls"

    @property
    def ending_key(self) -> tuple[object, ...]:
        """Returns what ends the output, in a form that is the same in all processes."""
        ending = self._ending
        return (
            ending.stops,
            ending.include_stop,
            sorted(ending.stop_token_ids),
            sorted(ending.silent_token_ids),
            ending.min_tokens,
            ending.skip_special_tokens,
        )

    def text_offsets(self, start: int = 0) -> TextOffsets:
        """Counts the characters of the output's text. `start`: the number of characters before the
        text."""
        return TextOffsets(self._tokenizer, self._ending.skip_special_tokens, start)

    async def _check_structure(self) -> None:
        """Raises `RequestRefused` if the output stopped without satisfying its grammar.

        An output for which the engine could not follow the grammar must not pass as valid.
        """
        if self.finish_reason is FinishReason.STOP and self.stop_reason is None:
            begin = 0 if self._reader is None else self._reader.answer_at
            await check_satisfied(self.answer_grammar, plain("".join(self._raw)[begin:]))

    def _read(self, delta: Delta, texts: Sequence[str], reader: OutputReader) -> Delta:
        """Returns the increment with the parts that the reader finds. `texts`: the texts of its
        tokens."""
        parts: list[Said] = []
        # the last token may have no text
        for token, text in zip(delta.tokens, texts, strict=False):
            self._unsaid.append(token)
            self._keep_parts(reader.push(text), parts)
            if text and not reader.holds:
                self._unsaid = []  # the held-back tokens were marks
        rest = delta.text[sum(map(len, texts)) :]
        if rest:
            self._keep_parts(reader.push(rest), parts)
        if delta.finish_reason is not None:
            self._keep_parts(reader.flush(self._is_cut), parts)
        calls = [call for part in parts for call in part.calls]
        self._called = self._called or bool(calls)
        return delta._replace(
            text="".join([part.text for part in parts]),
            calls=calls,
            reasoning="".join([part.reasoning for part in parts]),
            parts=parts or (NOTHING_SAID,),
        )

    def _keep_parts(self, found: Sequence[Said], parts: list[Said]) -> None:
        """Gives the first of these parts the tokens of the increment, and counts the tokens."""
        for part in found:
            tokens, self._unsaid = self._unsaid, []
            if part.reasoning:
                self.reasoning_tokens += len(tokens)
            if self.hide_reasoning:
                part = part._replace(reasoning="")
            parts.append(part._replace(tokens=tokens))

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH or isinstance(self.stop_reason, str)

    def _take(self, output: Output, texts: list[str]) -> Delta:
        """Returns the increment. Adds the text of each of its tokens to `texts`."""
        if output.finish_reason is FinishReason.ABORT:
            raise RequestRefused(503, "aborted", "The server aborted this request. Send it again.")
        if not self.delivered:  # if increments were delivered, the client was told already
            self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.timings_s = output.timings_s or self.timings_s
        tokens = output.tokens
        if tokens and self.prompt_logprobs is None:
            self.prompt_logprobs = tokens[0].prompt
        if self.hide_output:
            self.finish_reason = output.finish_reason and FinishReason.LENGTH
            return Delta(self, "", (), self.finish_reason, (), output)
        stopped_at = len(tokens) - 1 if output.finish_reason is FinishReason.STOP else -1
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            token_id = token.token_id
            if position == stopped_at:
                if token_id in self._ending.stop_token_ids:
                    self.stop_reason = token_id
                if token_id in self._ending.silent_token_ids:
                    break
            texts.append(self._pass(self._text_stream.push(token_id)))
            if self.finish_reason is not None:  # a stop string was found, so the output ends here
                said = tokens[: position + 1]
                return Delta(self, "".join(texts), said, self.finish_reason, (), output)
        text = "".join(texts)
        if output.finish_reason is not None:
            text += self._finish(output.finish_reason)
        return Delta(self, text, tokens, self.finish_reason, (), output)

    def _pass(self, text: str) -> str:
        """Returns the text that passes the stop strings, which may end the output here."""
        stops = self._stops
        if stops is None or self.num_tokens <= self._ending.min_tokens:
            return text
        certain = stops.push(text)
        if stops.found is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = stops.found
        return certain

    def _finish(self, reason: FinishReason) -> str:
        text = self._pass(self._text_stream.flush())
        if self.finish_reason is not None:
            return text
        self.finish_reason = reason
        return text + (self._stops.flush() if self._stops else "")


def _pieces(output: Output) -> list[Output]:
    """Returns the output as one piece for each token."""
    if len(output.tokens) < 2:
        return [output]
    pieces = [Output((token,), None, output.cached_tokens) for token in output.tokens]
    pieces[-1] = structs.replace(
        pieces[-1], finish_reason=output.finish_reason, timings_s=output.timings_s
    )
    return pieces


async def run_choices(
    choices: Sequence[Choice],
    backend: ModelBackend,
    take: Take,
    kept: KeptStream | None = None,
    known: Sequence[Delivered] = (),
    spend: Callable[[Delta], None] | None = None,
) -> None:
    """Runs all choices of a call side by side. If one choice fails, all choices end and its error
    is raised.

    Each increment is logged in `kept`, counted by `spend`, and given to `take`. Increments that
    `kept` already has, and tokens `known` from another connection, are sent again. Raises
    RequestRefused if the request is refused now or was refused by an earlier head (in `kept`), and
    whatever `take` raises.
    """
    takes = False

    async def pass_on(delta: Delta) -> None:
        nonlocal takes
        if kept is not None:
            kept.note(delta.choice.index, delta.output)
        if spend is not None:
            spend(delta)
        takes = True
        await take(delta)
        takes = False

    if kept is not None and kept.is_resumed:
        for choice in choices:
            choice.delivered = []
        for entry in kept.deliveries():
            await take(await choices[entry.index].replay(entry.output()))
        kept.raise_refusal(backend.note_refused)
    elif known:
        await _come_again(choices, known, pass_on)
    running = [choice for choice in choices if choice.finish_reason is None]
    try:
        if len(running) == 1:
            await running[0].run(backend, pass_on)
        elif running:
            await _run_side_by_side(running, backend, pass_on, kept)
    except RequestRefused as error:
        if kept is not None and not takes:
            kept.note_refused(error)
        raise


async def _come_again(choices: Sequence[Choice], known: Sequence[Delivered], take: Take) -> None:
    for choice in choices:
        choice.delivered = []
    for number, entry in enumerate(known):
        choice = choices[entry.index]
        output = entry.output()
        for piece in _pieces(output) if choice.one_by_one else (output,):
            if choice.finish_reason is None:
                await take(await choice.replay(piece))
        if number % REPLAYED_PER_TURN == REPLAYED_PER_TURN - 1:
            await asyncio.sleep(0)


async def _run_side_by_side(
    choices: Sequence[Choice], backend: ModelBackend, take: Take, kept: KeptStream | None
) -> None:
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
    works = [marked(_pump(choice, backend, queue), kept) for choice in choices]
    tasks = [asyncio.create_task(work) for work in works]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                await take(item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    choice: Choice, backend: ModelBackend, queue: asyncio.Queue[Delta | Exception | None]
) -> None:
    try:
        await choice.run(backend, queue.put)
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)

"""One choice: the output for one prompt as it grows.

Owns the steps between the head's tokens and the client's text: unfinished characters, stop strings,
counts, and the finish reason. The JSON is written elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from msgspec import structs

from moonpool.api.connection.kept_stream import Delivered, KeptStream
from moonpool.api.frontend import ModelFrontend, Output, RequestRefused
from moonpool.api.output_text.reasoning import ReasoningReader
from moonpool.api.sampling import Ending
from moonpool.api.stop_strings import StopMatcher
from moonpool.api.structured_output import check_satisfied
from moonpool.api.tools import ToolCallDelta, ToolReader
from moonpool.engine.tokenizer import Tokenizer
from moonpool.types import FinishReason, Request, Token, TokenLogprobs

NO_OUTPUT = Output()
REPLAYED_PER_TURN = 64
"""Known increments that are sent before other calls have their turn."""


class Delta(NamedTuple):
    """The text that one increment added to a choice, which may be empty, and its tokens."""

    choice: Choice
    text: str
    tokens: Sequence[Token]
    finish_reason: FinishReason | None  # of this increment; the choice itself may be ahead
    calls: Sequence[ToolCallDelta] = ()
    output: Output = NO_OUTPUT  # that it was made from
    reasoning: str = ""  # before the text


class Choice:
    """`deltas()` runs the request; the other attributes describe its progress."""

    def __init__(
        self,
        index: int,
        request: Request,
        ending: Ending,
        tokenizer: Tokenizer,
        tools: ToolReader | None = None,
    ):
        """`tools` finds the tool calls in the text."""
        self.index = index
        self.request = request
        self.echo: str | None = None  # the prompt's text, if the client wants it before the output
        self.hide_output = False  # the client asked for no tokens, the engine computed one
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # from the second token on
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.timings_s: dict[str, float] | None = None
        self.delivered: list[int] | None = None  # tokens the client has from another head
        self.reasoning: ReasoningReader | None = None  # set if reasoning is told from the text
        self.hide_reasoning = False
        self.one_by_one = False  # each token is an increment of its own
        self._tools = tools
        self._called = False
        self._structured: list[str] | None = [] if request.sampling.grammar else None
        self._ending = ending
        self._text_stream = tokenizer.stream(ending.skip_special_tokens)
        self._stops = StopMatcher(ending.stops, ending.include_stop) if ending.stops else None

    async def deltas(self, frontend: ModelFrontend) -> AsyncGenerator[Delta, None]:
        """Yields increments until the output ends. Leaving early aborts the request.

        Raises `RequestRefused`, and RuntimeError if the outputs stop without a finish reason.
        """
        delivered = None if self.delivered is None else tuple(self.delivered)
        outputs = frontend.submit(self.request, delivered)
        try:
            async for output in outputs:
                for piece in _pieces(output) if self.one_by_one else (output,):
                    yield await self._delta(piece)
                    if self.finish_reason is not None:
                        return
        finally:
            close = getattr(outputs, "aclose", None)
            if close is None:
                frontend.abort(self.request.request_id)
            else:
                await close()
        raise RuntimeError(f"request {self.request.request_id} ended without a finish reason")

    async def replay(self, output: Output) -> Delta:
        """Takes an output that the client has from another head."""
        delta = await self._delta(output)
        assert self.delivered is not None
        self.delivered.extend([token.token_id for token in output.tokens])
        return delta

    async def _delta(self, output: Output) -> Delta:
        delta = self._take(output)
        if self._structured is not None:
            await self._check_structure(delta)
        if self.reasoning is not None:
            delta = self._read_reasoning(delta, self.reasoning)
        return self._read_calls(delta)

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    @property
    def finish_word(self) -> str | None:
        """`finish_reason` in OpenAI's terms."""
        called = self._called and self.finish_reason is FinishReason.STOP
        return "tool_calls" if called else self.finish_reason

    @property
    def ending_key(self) -> tuple[object, ...]:
        """What ends the output, in a form that is the same in all processes."""
        ending = self._ending
        return (
            ending.stops,
            ending.include_stop,
            sorted(ending.stop_token_ids),
            sorted(ending.silent_token_ids),
            ending.min_tokens,
            ending.skip_special_tokens,
        )

    async def _check_structure(self, delta: Delta) -> None:
        """Raises `RequestRefused` if the output stopped without satisfying its grammar.

        A grammar that the engine could not follow must not look like a valid output.
        """
        assert self._structured is not None
        self._structured.append(delta.text)
        if self.finish_reason is FinishReason.STOP and self.stop_reason is None:
            await check_satisfied(self.request.sampling.grammar, "".join(self._structured))

    def _read_reasoning(self, delta: Delta, reader: ReasoningReader) -> Delta:
        reasoning, text = reader.push(delta.text)
        if delta.finish_reason is not None:
            more, rest = reader.flush()
            reasoning, text = reasoning + more, text + rest
        return delta._replace(text=text, reasoning="" if self.hide_reasoning else reasoning)

    def _read_calls(self, delta: Delta) -> Delta:
        if self._tools is None:
            return delta
        text, calls = self._tools.push(delta.text)
        if delta.finish_reason is not None:
            rest, last = self._tools.flush(self._is_cut)
            text, calls = text + rest, [*calls, *last]
        self._called = self._called or bool(calls)
        return delta._replace(text=text, calls=calls)

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH or isinstance(self.stop_reason, str)

    def _take(self, output: Output) -> Delta:
        if output.finish_reason is FinishReason.ABORT:
            raise RequestRefused(503, "aborted", "The server aborted this request. Send it again.")
        if not self.delivered:  # else the client was told already
            self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.timings_s = output.timings_s or self.timings_s
        tokens = output.tokens
        if tokens and self.prompt_logprobs is None:
            self.prompt_logprobs = tokens[0].prompt
        if self.hide_output:
            self.finish_reason = output.finish_reason and FinishReason.LENGTH
            return Delta(self, "", (), self.finish_reason, (), output)
        stopped_at = len(tokens) - 1 if output.finish_reason is FinishReason.STOP else -1
        text = ""
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            token_id = token.token_id
            if position == stopped_at:
                if token_id in self._ending.stop_token_ids:
                    self.stop_reason = token_id
                if token_id in self._ending.silent_token_ids:
                    break
            text += self._pass(self._text_stream.push(token_id))
            if self.finish_reason is not None:  # a stop string: the output ends here
                said = tokens[: position + 1]
                return Delta(self, text, said, self.finish_reason, (), output)
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
    """The output token by token."""
    if len(output.tokens) < 2:
        return [output]
    pieces = [Output((token,), None, output.cached_tokens) for token in output.tokens]
    pieces[-1] = structs.replace(
        pieces[-1], finish_reason=output.finish_reason, timings_s=output.timings_s
    )
    return pieces


async def run_choices(
    choices: Sequence[Choice],
    frontend: ModelFrontend,
    kept: KeptStream | None = None,
    known: Sequence[Delivered] = (),
) -> AsyncGenerator[Delta, None]:
    """Runs all choices of a call side by side. If one fails, all end and its error is raised.

    Each increment is logged in `kept` first. Those that are in it already come again, as do those
    that are `known` from another connection. Raises RequestRefused, now or as `kept` has it from
    another head.
    """
    running = choices
    if known and not (kept is not None and kept.is_resumed):
        async for delta in _come_again(choices, known):
            if kept is not None:
                kept.note(delta.choice.index, delta.output)
            yield delta
        running = [choice for choice in choices if choice.finish_reason is None]
    if kept is None:
        async with aclosing(_run(running, frontend)) as deltas:
            async for delta in deltas:
                yield delta
        return
    if kept.is_resumed:
        for choice in choices:
            choice.delivered = []
        for entry in kept.deliveries():
            yield await choices[entry.index].replay(entry.output())
        refused = kept.refusal()
        if refused is not None:
            raise refused
        running = [choice for choice in choices if choice.finish_reason is None]
    try:
        async with aclosing(_run(running, frontend)) as deltas:
            async for delta in deltas:
                kept.note(delta.choice.index, delta.output)
                yield delta
    except RequestRefused as error:
        kept.note_refused(error)
        raise


async def _come_again(
    choices: Sequence[Choice], known: Sequence[Delivered]
) -> AsyncGenerator[Delta, None]:
    for choice in choices:
        choice.delivered = []
    for number, entry in enumerate(known):
        choice = choices[entry.index]
        output = entry.output()
        for piece in _pieces(output) if choice.one_by_one else (output,):
            if choice.finish_reason is None:
                yield await choice.replay(piece)
        if number % REPLAYED_PER_TURN == REPLAYED_PER_TURN - 1:
            await asyncio.sleep(0)


async def _run(choices: Sequence[Choice], frontend: ModelFrontend) -> AsyncGenerator[Delta, None]:
    if not choices:
        return
    if len(choices) == 1:
        async with aclosing(choices[0].deltas(frontend)) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(choice, frontend, queue)) for choice in choices]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    choice: Choice, frontend: ModelFrontend, queue: asyncio.Queue[Delta | Exception | None]
) -> None:
    try:
        async with aclosing(choice.deltas(frontend)) as deltas:
            async for delta in deltas:
                queue.put_nowait(delta)
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)

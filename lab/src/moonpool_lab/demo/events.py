"""Runs the events after the demo's conversations: fills the memory, and kills an instance.

Other requests fill the memory of all instances, so that a conversation's blocks are only on SSDs
when it continues. Then the instance that decodes an answer is killed while decoding it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable

from moonpool_lab.demo.answers import AnsweredTurn, Event
from moonpool_lab.demo.client import CompletionClient
from moonpool_lab.demo.workload import TALE, Conversation, ConversationTurn, filler, look_up

STRANGERS = 4
MAX_WAVES = 6
STRANGER_TOKENS = 3000
KILL_AFTER_CHARACTERS = 60
ASKED_AFTERWARDS = "berth-003"


async def ask(
    client: CompletionClient,
    talk: Conversation,
    turn: ConversationTurn,
    on_text: Callable[[str], None] | None = None,
    request_id: str = "",
) -> AnsweredTurn:
    """Sends one turn, and adds the question and the answer to the conversation."""
    tokens = len(turn.expected) if turn.stop is None else 48
    stop = {} if turn.stop is None else {"stop": turn.stop}
    prompt = talk.text + turn.question
    answer = await client.complete(
        prompt, on_text, request_id, temperature=0, max_tokens=tokens, **stop
    )
    right = not answer.error and answer.text == turn.expected
    explained = await client.explain(answer.request_id)
    talk.note(turn, answer.text)
    return AnsweredTurn(talk.num_asked, talk.user, turn.what, answer, right, explained)


async def fill_memory(
    client: CompletionClient, talk: Conversation, rows: list[AnsweredTurn]
) -> Event:
    """Sends requests of strangers until a turn of the conversation needs blocks from an SSD."""
    rng = random.Random(11)
    num_strangers = loaded = 0
    for _ in range(MAX_WAVES):
        prompts = [filler(rng, STRANGER_TOKENS) for _ in range(STRANGERS)]
        await asyncio.gather(*(client.complete(p, max_tokens=2, temperature=0) for p in prompts))
        num_strangers += STRANGERS
        if num_strangers < 2 * STRANGERS:
            continue
        rows.append(await ask(client, talk, look_up(talk, ASKED_AFTERWARDS)))
        loaded = rows[-1].explained["loaded_tokens"]
        if loaded:
            break
    text = f"{num_strangers} strangers filled the memory; then {talk.user}'s next turn"
    text += f" read {loaded:,} tokens of KVCache from an SSD"
    return Event("memory was full", text)


async def kill_in_an_answer(
    client: CompletionClient,
    talk: Conversation,
    rows: list[AnsweredTurn],
    on_text: Callable[[str], None],
) -> Event:
    """Kills the decode instance of an answer while the answer streams."""
    begun = asyncio.Event()
    seen = 0

    def note(text: str) -> None:
        nonlocal seen
        on_text(text)
        seen += len(text)
        if seen >= KILL_AFTER_CHARACTERS:
            begun.set()

    begin, rest = TALE[:21], TALE[21:].rstrip()
    turn = ConversationTurn(f"Tell it again: {begin}", rest, None, "the tale, again")
    request_id = "demo-answer-that-survives"
    answering = asyncio.create_task(ask(client, talk, turn, note, request_id))
    started = asyncio.create_task(begun.wait())
    await asyncio.wait((answering, started), return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    name, at = "no instance", seen
    if not answering.done():
        explained = await client.explain(request_id)
        name = str(explained["decode_instance"])
        found = (await client.cluster())["instances"]
        for instance in found:
            if instance["instance_id"] == name:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(instance["pid"], signal.SIGKILL)
    row = await answering
    rows.append(row)
    how = "ended right" if row.right else "ended WRONG"
    text = f"{name} was killed after {at} of {len(rest)} characters; the answer {how},"
    text += f" on {row.explained['decode_instance']}, in {row.explained['attempts']} attempts"
    return Event("an instance died", text)

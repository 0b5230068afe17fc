"""Tests the reader of vLLM's KV events: events of a real vLLM (golden), of older releases, and
damaged events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.types import BlockKey
from moonpool.vllm.actions import CacheEventsReceived
from moonpool.vllm.block_names import (
    ExternalBlocks,
    ExternalBlocksCleared,
    ExternalBlocksRemoved,
    ExternalBlocksStored,
)
from moonpool.vllm.events import EventReader, EventsError, read_batch
from moonpool_lab.demo.local_server import free_port

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "vllm_events.json").read_text())
BATCHES = [bytes.fromhex(text) for text in GOLDEN["batches"]]
encode = msgspec.msgpack.encode


def test_a_real_ones_events_name_the_blocks_of_its_prompts() -> None:
    names = ExternalBlocks(b"layout", GOLDEN["block_tokens"])
    for batch in BATCHES:
        for event in read_batch(batch):
            names.hear(event)
    prompt = GOLDEN["prompt"]
    size, root = GOLDEN["block_tokens"], root_key(b"layout", "")
    expected = set(block_keys(prompt, size, root))
    expected |= set(block_keys(prompt[:64] + [7] * 40, size, root))
    salted = BlockKey(bytes.fromhex(GOLDEN["salt"]))
    expected |= set(block_keys(prompt[:40], size, salted))
    assert set(names.keys) == expected
    assert len(expected) == 4


def test_older_releases_rely_on_the_order_of_fields() -> None:
    events = [
        ["BlockStored", [b"h1", b"h2"], None, [1, 2, 3, 4], 2, None],
        ["BlockStored", [b"h3"], b"h2", [5, 6], 2, None, "CPU"],
        ["BlockRemoved", [b"h1"]],
        ["BlockRemoved", [b"h1"], "CPU"],
        ["AllBlocksCleared"],
    ]
    assert read_batch(encode([1.0, events])) == (
        ExternalBlocksStored(hashes=(b"h1", b"h2"), parent=None, token_ids=(1, 2, 3, 4)),
        ExternalBlocksStored(hashes=(b"h3",), parent=b"h2", token_ids=(5, 6), medium="CPU"),
        ExternalBlocksRemoved(hashes=(b"h1",)),
        ExternalBlocksRemoved(hashes=(b"h1",), medium="CPU"),
        ExternalBlocksCleared(),
    )


STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


@pytest.mark.parametrize(
    "other",
    [
        {"lora_id": 3},
        {"lora_name": "mine"},
        {"extra_keys": [["image", 3]]},
        {"extra_keys": [[["image", 3]]]},
        {"group_idx": 1},
        {"token_ids": [1, -2]},
        {"token_ids": [1, 1 << 40]},
        {"token_ids": "ab"},
        {"block_hashes": [1.5]},
        {"block_hashes": None},
        {"parent_block_hash": [1]},
        {"type": "Other"},
        {"type": ["BlockStored"]},
    ],
)
def test_what_is_not_the_models_own_or_makes_no_sense_is_left_out(other: dict[str, Any]) -> None:
    good = read_batch(encode([1.0, [STORED], 0]))
    assert len(good) == 1
    assert read_batch(encode([1.0, [STORED | other, STORED], 0])) == good


def test_blocks_of_an_adapter_are_named_by_its_salt() -> None:
    root = root_key(b"layout", "tenant", "mine")
    first = STORED | {"lora_id": 1, "lora_name": "mine", "extra_keys": [["mine", root.hex()]]}
    more = {"parent_block_hash": 1, "block_hashes": [2], "extra_keys": [["mine"]]}
    names = ExternalBlocks(b"layout", 2)
    for event in read_batch(encode([1.0, [first, first | more]])):
        names.hear(event)
    tokens = [*STORED["token_ids"], *STORED["token_ids"]]
    assert set(names.keys) == set(block_keys(tokens, 2, root))


@given(st.binary(max_size=200))
def test_rubbish_is_refused_with_a_value_error(payload: bytes) -> None:
    try:
        read_batch(payload)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - or it happened to be a batch


@settings(max_examples=50, deadline=None)
@given(st.lists(st.recursive(st.none() | st.text(max_size=3), st.lists, max_leaves=6), max_size=5))
def test_batches_of_rubbish_hold_no_events(events: list[Any]) -> None:
    assert all(isinstance(e, ExternalBlocksCleared) for e in read_batch(encode([1.0, events])))


class Publisher:
    """Publishes and repeats events like vLLM, on ports of its own."""

    def __init__(self, zmq: Any) -> None:
        context = zmq.asyncio.Context.instance()
        self.zmq, self.sent = zmq, list[tuple[int, bytes]]()
        self.out, self.again = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self.out.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self.again.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept = 1000

    async def await_subscription(self) -> None:
        assert await self.out.recv() == b"\x01"

    async def publish(self, number: int, tokens: list[int], loses: bool = False) -> None:
        stored = STORED | {"block_hashes": [number], "token_ids": tokens}
        payload = encode([1.0, [stored], 0])
        self.sent.append((number, payload))
        if not loses:
            await self.out.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def repeat(self) -> None:
        while True:
            client, _, first = await self.again.recv_multipart()
            for number, payload in self.sent[-self.kept :]:
                if number >= int.from_bytes(first, "big"):
                    named = number.to_bytes(8, "big")
                    await self.again.send_multipart([client, b"", b"", named, payload])
            await self.again.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self.out.close(linger=0)
        self.again.close(linger=0)


def follow(
    scenario: Callable[[Publisher, Callable[..., Any]], Any], replay: bool = True
) -> list[CacheEventsReceived]:
    """Returns the events that a reader got while the scenario ran. The scenario gets the
    publisher, and a function that waits for a number of events, and for the hash of the last."""
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("zmq.asyncio")
    told: list[CacheEventsReceived] = []

    async def run() -> None:
        publisher = Publisher(zmq)
        repeating = asyncio.create_task(publisher.repeat())
        reader = EventReader(publisher.events, publisher.replay if replay else "")
        # the batches were published before the reader came
        await scenario(publisher, lambda n: None)
        following = asyncio.create_task(reader.run(told.append))

        async def wait_for(count: int, last: int | None = None) -> None:
            async with asyncio.timeout(60):
                while len(told) < count or last not in (None, *words(told)[-1:]):
                    await asyncio.sleep(0.01)

        try:
            async with asyncio.timeout(60):
                await publisher.await_subscription()
            await scenario(publisher, wait_for)
        finally:
            following.cancel()
            repeating.cancel()
            await asyncio.gather(following, repeating, return_exceptions=True)
            publisher.close()

    asyncio.run(run())
    return told


def words(told: list[CacheEventsReceived]) -> list[int | str]:
    """Returns the announced hashes in order, and the places where all hashes had to be
    forgotten."""
    found: list[int | str] = []
    for each in told:
        found += ["lost"] if each.lost else []
        found += [e.hashes[0] for e in each.events if isinstance(e, ExternalBlocksStored)]  # type: ignore[misc]
    return found


def test_what_was_said_before_the_reader_came_is_repeated() -> None:
    async def scenario(publisher: Publisher, wait_for: Callable[..., Any]) -> None:
        if not publisher.sent:
            await publisher.publish(0, [1, 2])
            await publisher.publish(1, [3, 4])
            return
        await wait_for(2)
        await publisher.publish(2, [5, 6])
        await wait_for(3)

    assert words(follow(scenario)) == [0, 1, 2]


def test_what_was_lost_on_the_way_is_repeated_in_order() -> None:
    async def scenario(publisher: Publisher, wait_for: Callable[..., Any]) -> None:
        if not publisher.sent:
            await publisher.publish(0, [1, 2])
            return
        await wait_for(1)
        await publisher.publish(1, [1, 2], loses=True)
        await publisher.publish(2, [1, 2], loses=True)
        await publisher.publish(3, [1, 2])
        await wait_for(4)

    assert words(follow(scenario)) == [0, 1, 2, 3]


@pytest.mark.parametrize("replay", [False, True])
def test_what_cannot_be_repeated_makes_it_forget(replay: bool) -> None:
    async def scenario(publisher: Publisher, wait_for: Callable[..., Any]) -> None:
        if not publisher.sent:
            await publisher.publish(0, [1, 2])
            return
        await publisher.publish(1, [1, 2])
        await wait_for(1, last=1)
        publisher.kept = 1
        await publisher.publish(2, [1, 2], loses=True)
        await publisher.publish(3, [1, 2])
        await wait_for(2, last=3)
        await publisher.publish(4, [1, 2])
        await wait_for(3, last=4)

    found = words(follow(scenario, replay))
    assert found[-1] == 4
    assert "lost" in found
    assert 2 not in found[found.index("lost") :]
    assert found[found.index("lost") :].count(3) == 1


def test_a_publisher_that_begins_anew_is_another_one() -> None:
    async def scenario(publisher: Publisher, wait_for: Callable[..., Any]) -> None:
        if not publisher.sent:
            await publisher.publish(0, [1, 2])
            await publisher.publish(1, [1, 2])
            return
        await wait_for(2)
        await publisher.publish(0, [7, 8])
        await wait_for(3)
        await publisher.publish(1, [7, 8])
        await wait_for(4, last=1)

    assert words(follow(scenario)) == [0, 1, "lost", 0, 1]


@pytest.mark.parametrize("replay", [False, True])
def test_a_publisher_whose_first_batch_is_missed_is_another_one(replay: bool) -> None:
    async def scenario(publisher: Publisher, wait_for: Callable[..., Any]) -> None:
        if not publisher.sent:
            await publisher.publish(0, [1, 2])
            return
        for number in range(1, 6):
            await publisher.publish(number, [1, 2])
        await wait_for(5, last=5)
        publisher.sent.clear()
        await publisher.publish(0, [7, 8], loses=True)
        await publisher.publish(1, [7, 8], loses=True)
        await publisher.publish(2, [7, 8])
        await wait_for(7, last=2)
        await publisher.publish(3, [7, 8])
        await wait_for(8, last=3)

    found = words(follow(scenario, replay))
    assert found[found.index("lost") :] == ["lost", *([0, 1] if replay else []), 2, 3]


def test_a_bad_address_is_one_line() -> None:
    pytest.importorskip("zmq")

    async def make() -> None:
        EventReader("tcp://nowhere", "")

    with pytest.raises(EventsError, match="tcp://nowhere"):
        asyncio.run(make())


def test_a_publisher_that_is_not_heard_is_asked_at_its_replay_endpoint() -> None:
    """The publisher behaves like a vLLM that connects to EVENTS and does not listen there."""
    zmq = pytest.importorskip("zmq")
    told: list[CacheEventsReceived] = []

    async def run() -> EventReader:
        publisher = Publisher(zmq)
        repeating = asyncio.create_task(publisher.repeat())
        reader = EventReader(f"tcp://127.0.0.1:{free_port()}", publisher.replay)
        following = asyncio.create_task(reader.run(told.append))
        try:
            async with asyncio.timeout(60):
                for number in range(3):
                    await publisher.publish(number, [1, 2], loses=True)
                    while len(told) <= number:
                        await asyncio.sleep(0.01)
            return reader
        finally:
            following.cancel()
            repeating.cancel()
            await asyncio.gather(following, repeating, return_exceptions=True)
            publisher.close()

    reader = asyncio.run(run())
    assert words(told) == [0, 1, 2]
    assert (reader.num_published, reader.num_replayed) == (0, 3)
    assert not reader.is_open


def test_the_connection_tells_a_publisher_from_another_socket() -> None:
    zmq = pytest.importorskip("zmq")

    async def state(where: str, until: str) -> str:
        reader = EventReader(where, "")
        following = asyncio.create_task(reader.run(lambda _: None))
        try:
            async with asyncio.timeout(30):
                while reader.connection != until:
                    await asyncio.sleep(0.01)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return reader.connection

    async def run() -> None:
        publisher = Publisher(zmq)
        try:
            assert await state(publisher.events, "open") == "open"
            assert await state(publisher.replay, "refused") == "refused"
        finally:
            publisher.close()

    asyncio.run(run())

"""A streamed completion whose events are taken while their bytes are read, and the reports that
come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moonpool.protocol.messages import AttemptId, BlocksChanged, DecodeAccepted, Report
from moonpool.types import BlockKey
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.reports import BLOCKS_S, InstanceReports
from tests.http_server import QuietHandler, serving

DONE = b"data: [DONE]\n\n"


@contextmanager
def server(data: bytes, status: int = 200) -> Iterator[tuple[str, list[int]]]:
    """Answers each POST with these bytes. The list has the port of each client."""
    ports: list[int] = []

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.read_json()
            ports.append(self.client_address[1])
            self.answer(data, status, "text/event-stream")

    with serving(Handler) as place:
        yield f"http://{place}", ports


def follow(url: str, take: Callable[[bytes], None], times: int = 1) -> None:
    async def run() -> None:
        client = VllmClient(url)
        try:
            for _ in range(times):
                await client.follow(b"{}", take)
        finally:
            client.close()

    asyncio.run(run())


def test_events_come_in_their_order_and_the_connection_serves_again() -> None:
    found: list[bytes] = []
    with server(b": hello\n\ndata: 1\n\ndata: 2\n\n" + DONE + b"data: 3\n\n") as (url, ports):
        follow(url, found.append, times=2)
    assert found == [b"1", b"2"] * 2
    assert len(ports) == 2
    assert len(set(ports)) == 1


def test_what_the_taker_raises_ends_the_request() -> None:
    found: list[bytes] = []

    def take(event: bytes) -> None:
        found.append(event)
        raise DialectError("no such event")

    both = server(b"data: 1\n\ndata: 2\n\n" + DONE)
    with both as (url, _), pytest.raises(DialectError, match="no such event"):
        follow(url, take)
    assert found == [b"1"]


def test_a_refusal_has_the_servers_words_and_its_status() -> None:
    refusing = server(b'{"message": "too long"}', 400)
    with refusing as (url, _), pytest.raises(VllmError, match="too long") as raised:
        follow(url, lambda _: None)
    assert (raised.value.status, raised.value.refused) == (400, True)


def test_an_output_without_its_end_is_no_answer() -> None:
    cut = server(b"data: 1\n\n")
    with cut as (url, _), pytest.raises(VllmError, match="in the middle of an output"):
        follow(url, lambda _: None)


def changed(number: int) -> BlocksChanged:
    return BlocksChanged(sequence=number, stored=(BlockKey(b"%d" % number),))


def test_changes_of_blocks_go_with_the_next_report_or_soon() -> None:
    sent: list[list[Report]] = []
    accepted = DecodeAccepted(attempt_id=AttemptId("a"))

    async def run() -> None:
        reports = InstanceReports(lambda each: sent.append(list(each)))
        reports.send([changed(0)])
        reports.send([changed(1)])
        assert sent == []
        reports.send([accepted])
        assert sent == [[changed(0), changed(1), accepted]]
        reports.send([changed(2)])
        async with asyncio.timeout(60):
            while len(sent) < 2:
                await asyncio.sleep(BLOCKS_S)
        assert sent[1] == [changed(2)]
        reports.send([changed(3)])
        reports.reset()
        reports.send([accepted])
        assert sent[2] == [accepted]

    asyncio.run(run())

"""Tests that the webhook gets the newest numbers, even if its first call fails."""

from __future__ import annotations

import asyncio
import json

import pytest

import moonpool.head.webhook as webhook_module
from moonpool.conductor.actions import InstancesWanted
from moonpool.head.webhook import WantedWebhook


async def received(answers: list[str], wanted: list[InstancesWanted]) -> list[dict[str, object]]:
    """Runs a server that answers with these statuses, and returns the bodies that it received."""
    bodies: list[dict[str, object]] = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(bodies) < len(answers):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            ]
            bodies.append(json.loads(await reader.readexactly(length)))
            status = answers[len(bodies) - 1]
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    webhook = WantedWebhook(f"http://127.0.0.1:{port}/scale")
    for each in wanted:
        webhook.post(each)
    await asyncio.wait_for(done.wait(), 60)
    webhook.close()
    server.close()
    return bodies


def test_only_the_newest_numbers_are_posted() -> None:
    wanted = [InstancesWanted(1, 1), InstancesWanted(3, 2)]
    bodies = asyncio.run(received(["200 OK"], wanted))
    assert bodies == [{"wanted_instances": {"prefill": 3, "decode": 2}}]


def test_a_failed_post_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "RETRY_S", 0.01)
    bodies = asyncio.run(received(["500 Oops", "200 OK"], [InstancesWanted(2, 1)]))
    assert bodies == [{"wanted_instances": {"prefill": 2, "decode": 1}}] * 2


def test_without_an_address_nothing_is_posted() -> None:
    async def num_tasks() -> int:
        WantedWebhook("").post(InstancesWanted(2, 1))
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(num_tasks()) == 0

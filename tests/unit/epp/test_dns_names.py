"""Tests endpoints from DNS, with a nameserver that answers over UDP and TCP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("dns")

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from moonpool.discovery import dns_names
from moonpool.discovery.dns_names import DnsName, DnsSettings, addresses, parse_settings
from moonpool.discovery.endpoint import Listing, SourceError
from moonpool.discovery.source_text import DnsSource, read_dns_name
from moonpool.discovery.sources import Sources
from moonpool.types import Role


class DnsServer(asyncio.DatagramProtocol):
    """`zone` has the SRV records by name; `fails` makes each question a failure, and `cuts` tells
    clients to ask again over TCP."""

    def __init__(self) -> None:
        self.zone: dict[str, list[str]] = {}
        self.fails = self.cuts = False
        self.asked: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(self.answer(data, self.cuts), addr)

    async def over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        answer = self.answer(await reader.readexactly(size), cuts=False)
        writer.write(len(answer).to_bytes(2, "big") + answer)
        writer.close()

    def answer(self, data: bytes, cuts: bool) -> bytes:
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        question = asked.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        if self.fails:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.zone:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif cuts:
            answer.flags |= dns.flags.TC
        elif self.zone[name]:
            kind = dns.rdatatype.to_text(question.rdtype)
            assert kind == "SRV"
            records = dns.rrset.from_text(question.name, 1, "IN", kind, *self.zone[name])
            answer.answer.append(records)
        return answer.to_wire()


@asynccontextmanager
async def a_nameserver() -> AsyncIterator[tuple[DnsServer, int]]:
    loop = asyncio.get_running_loop()
    while True:
        transport, server = await loop.create_datagram_endpoint(
            DnsServer, local_addr=("127.0.0.1", 0), family=socket.AF_INET
        )
        port = transport.get_extra_info("sockname")[1]
        try:
            tcp = await asyncio.start_server(server.over_tcp, "127.0.0.1", port)
            break
        except OSError:  # tries again, because another program has this number over TCP
            transport.close()
    try:
        yield server, port
    finally:
        tcp.close()
        transport.close()


def test_names_are_read() -> None:
    assert read_dns_name("vllm.example:8000") == DnsSource("vllm.example", 8000)
    assert read_dns_name("prefill=a-b.c.:1") == DnsSource("a-b.c.", 1, Role.PREFILL)
    assert read_dns_name("_vllm._tcp.example") == DnsSource("_vllm._tcp.example", None)
    bad = ("example", "a:0x1", "a:99999", "a:0", "_s._tcp.a:1", "cook=a:1", "", "a b:1", "=a:1")
    for text in bad:
        with pytest.raises(SourceError):
            read_dns_name(text)


async def follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_names, "LEAST_S", 0.02)
    async with a_nameserver() as (server, port):
        server.zone = {
            "_v._tcp.example": ["0 0 8000 10.0.0.1.", "0 0 8000 10.0.0.2."],
            "_p._tcp.example": ["0 0 9000 10.0.1.1.", "0 0 9001 10.0.1.1."],
        }
        settings = DnsSettings((("127.0.0.1", port),))
        seen: asyncio.Queue[Listing] = asyncio.Queue()
        texts = ("_v._tcp.example", "prefill=_p._tcp.example")
        names = [DnsName(read_dns_name(text), settings) for text in texts]
        task = asyncio.create_task(Sources(names, texts).follow(seen.put_nowait))

        def at(listing: Listing) -> list[str]:
            return sorted(each.address for each in listing.endpoints)

        async with asyncio.timeout(60):
            while not (first := await seen.get()).is_whole:
                pass
            expected = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.1.1:9000", "10.0.1.1:9001"]
            assert at(first) == expected
            roles = {each.address: str(each.role) for each in first.endpoints}
            assert [roles[each] for each in expected] == ["mixed"] * 2 + ["prefill"] * 2
            server.fails = True  # if the name server fails, all endpoints stay
            await asyncio.sleep(0.2)
            assert seen.empty()
            server.fails, server.cuts = False, True
            server.zone["_v._tcp.example"] = ["0 0 8000 10.0.0.2.", "0 0 8000 10.0.0.3."]
            listing = await seen.get()
            assert "10.0.0.3:8000" in at(listing)
            # an endpoint is removed only after two lookups without it
            if "10.0.0.1:8000" in at(listing):
                listing = await seen.get()
            assert "10.0.0.1:8000" not in at(listing)
            server.zone.clear()  # the names do not exist any more
            while at(await seen.get()):
                pass
        task.cancel()


def test_records_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(follow(monkeypatch))


async def miss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that one lookup lacks must stay, because a resolver may shorten a long list."""
    monkeypatch.setattr(dns_names, "LEAST_S", 0.01)
    answers = [{"10.0.0.1", "10.0.0.2"}, {"10.0.0.1"}] * 20

    async def found(name: str) -> set[str]:
        return answers.pop() if answers else {"10.0.0.1"}

    monkeypatch.setattr(dns_names, "addresses", found)
    seen: list[int] = []
    source = DnsName(read_dns_name("v.example:1"))
    task = asyncio.create_task(source.follow(lambda listing: seen.append(len(listing.endpoints))))
    while answers:
        await asyncio.sleep(0.01)
    task.cancel()
    assert seen in ([1, 2], [2])


def test_a_record_that_is_missed_once_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(miss_once(monkeypatch))


async def search() -> None:
    async with a_nameserver() as (server, port):
        server.zone = {"_v._tcp.llm.svc.cluster.local": ["0 0 8000 10.0.0.1."]}
        domains = ("other.local", "svc.cluster.local")
        settings = DnsSettings((("127.0.0.1", port),), domains, ndots=5)
        seen: asyncio.Queue[Listing] = asyncio.Queue()
        source = DnsName(read_dns_name("_v._tcp.llm"), settings)
        task = asyncio.create_task(source.follow(seen.put_nowait))
        async with asyncio.timeout(60):
            assert [each.address for each in (await seen.get()).endpoints] == ["10.0.0.1:8000"]
        task.cancel()
        assert server.asked[:2] == ["_v._tcp.llm.other.local", "_v._tcp.llm.svc.cluster.local"]


def test_a_short_name_is_looked_for_in_the_domains_of_the_machine() -> None:
    asyncio.run(search())


def test_the_settings_of_a_machine_are_read() -> None:
    text = (
        "# by kubelet\nnameserver 10.96.0.10\nnameserver fd00::a\n"
        "search llm.svc.cluster.local svc.cluster.local\noptions timeout:2 ndots:5\noptions ndots:x"
    )
    found = parse_settings(text)
    assert found.nameservers == (("10.96.0.10", 53), ("fd00::a", 53)) and found.ndots == 5
    assert found.candidates("a.b.")[0] == "a.b." and len(found.candidates("a.b")) == 3
    assert found.candidates("a.b.c.d.e.f")[0] == "a.b.c.d.e.f"
    assert parse_settings("nonsense\n\n").candidates("a.b") == ["a.b"]


def test_a_host_of_both_families_is_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        both = [
            (socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)),
            (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
        ]

        async def found(*_: Any, **__: Any) -> list[Any]:
            return both

        monkeypatch.setattr(loop, "getaddrinfo", found)
        assert await addresses("v") == {"10.0.0.1"}
        both.pop()
        assert await addresses("v") == {"fd00::1"}

    asyncio.run(run())

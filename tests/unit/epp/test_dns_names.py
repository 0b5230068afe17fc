"""Endpoints from DNS, of a server that answers over UDP."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

pytest.importorskip("dns")

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rrset

from moonpool.discovery.listed_server import SourceError
from moonpool.epp.endpoint import Listing
from moonpool.epp.sources import dns_names
from moonpool.epp.sources.dns_names import DnsName, DnsNames, read_dns_name

Zone = dict[tuple[str, str], list[str]]


class DnsServer(asyncio.DatagramProtocol):
    """`zone` has the records by name and type; `fails` makes each question a failure."""

    def __init__(self) -> None:
        self.zone: Zone = {}
        self.fails = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        question = asked.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        known = {each for each, _ in self.zone}
        if self.fails:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in known:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif (name, kind) in self.zone:
            records = self.zone[name, kind]
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *records))
        self._transport.sendto(answer.to_wire(), addr)


def test_names_are_read() -> None:
    assert read_dns_name("vllm.example:8000") == DnsName(name="vllm.example", port=8000, role="")
    assert read_dns_name("prefill=a-b.c.:1").role == "prefill"
    assert read_dns_name("_vllm._tcp.example") == DnsName(
        name="_vllm._tcp.example", port=0, role=""
    )
    for text in ("example", "a:0x1", "a:99999", "_s._tcp.a:1", "cook=a:1", "", "a b:1", "=a:1"):
        with pytest.raises(SourceError):
            read_dns_name(text)


async def follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_names, "LEAST_S", 0.02)
    monkeypatch.setattr(dns_names, "MOST_S", 0.05)
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        DnsServer, local_addr=("127.0.0.1", 0), family=socket.AF_INET
    )
    server.zone = {
        ("v.example", "A"): ["10.0.0.1", "10.0.0.2"],
        ("v.example", "AAAA"): ["fd00::1"],
        ("_p._tcp.example", "SRV"): ["0 0 9000 one.example.", "0 0 9001 one.example."],
        ("one.example", "A"): ["10.0.1.1"],
    }
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    seen: asyncio.Queue[Listing] = asyncio.Queue()
    names = [read_dns_name("v.example:8000"), read_dns_name("prefill=_p._tcp.example")]
    task = asyncio.create_task(DnsNames(names, resolver).follow(seen.put_nowait))

    def addresses(listing: Listing) -> list[str]:
        return sorted(each.address for each in listing.endpoints)

    async with asyncio.timeout(60):
        first = await seen.get()
        assert addresses(first) == [
            "10.0.0.1:8000",
            "10.0.0.2:8000",
            "10.0.1.1:9000",
            "10.0.1.1:9001",
            "[fd00::1]:8000",
        ]
        assert [str(each.role) for each in first.endpoints] == ["mixed"] * 3 + ["prefill"] * 2
        server.fails = True  # all stays as it was
        await asyncio.sleep(0.2)
        assert seen.empty()
        server.fails = False
        server.zone["v.example", "A"] = ["10.0.0.2", "10.0.0.3"]
        listing = await seen.get()
        assert "10.0.0.3:8000" in addresses(listing)
        if "10.0.0.1:8000" in addresses(listing):  # it is gone when it is missed twice
            listing = await seen.get()
        assert "10.0.0.1:8000" not in addresses(listing)
        server.zone.clear()  # the names do not exist any more
        while addresses(await seen.get()):
            pass
    task.cancel()
    transport.close()


def test_records_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(follow(monkeypatch))


async def miss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that one lookup lacks, of many that a resolver shortens, stays."""
    monkeypatch.setattr(dns_names, "LEAST_S", 0.01)
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.1"]] * 20
    source = DnsNames([read_dns_name("v.example:1")], dns.asyncresolver.Resolver(configure=False))

    async def addresses(name: str, resolver: object) -> tuple[list[str], float]:
        return (answers.pop() if answers else ["10.0.0.1"]), 0.01

    monkeypatch.setattr(source, "_addresses", addresses)
    seen: list[int] = []
    task = asyncio.create_task(source.follow(lambda listing: seen.append(len(listing.endpoints))))
    while answers:
        await asyncio.sleep(0.01)
    task.cancel()
    assert seen in ([1, 2], [2])


def test_a_record_that_is_missed_once_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(miss_once(monkeypatch))

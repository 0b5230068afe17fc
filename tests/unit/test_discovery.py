"""Which vLLM servers there are: files and answers of DNS as they come, and who may join."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config.rules import vllm_place
from moonpool.discovery.dns_records import parse_srv, resolve, srv_query
from moonpool.discovery.endpoints_file import parse_endpoints
from moonpool.discovery.listed_server import DnsSource, ListedServer, SourceError, parse_source
from moonpool.discovery.membership import (
    ABSENT_S,
    HOLD_OFFS,
    MAX_SERVERS,
    DrainServer,
    HoldServerOff,
    JoinServer,
    Membership,
    TooManyServers,
)
from moonpool.types import InstanceId, Role
from tests.live.test_discovery import nameserver

A, B = (ListedServer(name, Role.MIXED, f"http://{name}:8000") for name in "ab")

LLM_D = b"""
endpoints:
  - name: vllm-0
    address: "10.0.0.1"
    port: "8000"
  - name: vllm-1          # a comment
    namespace: llm
    address: 10.0.0.2
    port: 8001
    labels: {llm-d.ai/role: prefill, moonpool.dev/kv-events-port: "5557"}
  - {name: vllm-2, address: "fd00::2", port: "8000", labels: {llm-d.ai/role: decode}}
  - {name: encoder, address: 10.0.0.4, port: "8000", labels: {llm-d.ai/role: encode}}
"""


def test_a_file_of_llm_d_is_read() -> None:
    servers, problems = parse_endpoints(LLM_D)
    assert problems == []
    assert servers == [
        ListedServer("vllm-0", Role.MIXED, "http://10.0.0.1:8000"),
        ListedServer("vllm-1", Role.PREFILL, "http://10.0.0.2:8001,tcp://10.0.0.2:5557"),
        ListedServer("vllm-2", Role.DECODE, "http://[fd00::2]:8000"),
    ]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{name: a, address: 10.0.0.1}", "port"),
        ("{name: a, address: 10.0.0.1, port: 70000}", "port"),
        ("{name: a, address: 10.0.0.1, port: x}", "port"),
        ("{name: a, address: 'a/b', port: 80}", "address"),
        ("{name: '--head', address: h, port: 80}", "name"),
        ("{name: 3, address: h, port: 80}", "texts"),
        ("{address: h, port: 80}", "texts"),
        ("{name: a, address: h, port: 80, labels: [x]}", "labels"),
        ("{name: a, address: h, port: 80, labels: {llm-d.ai/role: cook}}", "cook"),
        ("{name: b, address: h, port: 80}", "second"),
        ("text", "mapping"),
    ],
)
def test_a_wrong_entry_leaves_out_no_other(entry: str, said: str) -> None:
    text = f"endpoints: [{{name: b, address: h, port: 80}}, {entry}]"
    servers, (problem,) = parse_endpoints(text.encode())
    assert [server.name for server in servers] == ["b"]
    assert said in problem and "entry 2" in problem


@pytest.mark.parametrize(
    "data", [b"", b"endpoints: [", b"endpoints: 3", b"[]", b"\xff", b"a: !!x y"]
)
def test_a_file_that_is_none_is_one_error(data: bytes) -> None:
    with pytest.raises(SourceError):
        parse_endpoints(data)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_servers_or_one_error(data: bytes) -> None:
    for text in (data, b"endpoints:\n" + data):
        with contextlib.suppress(SourceError):
            assert all(server.name for server in parse_endpoints(text)[0])


# DNS


def test_sources_are_read() -> None:
    assert parse_source("dns://vllm.llm.svc:8000?role=decode&events=5557") == DnsSource(
        "vllm.llm.svc", 8000, Role.DECODE, 5557
    )
    assert parse_source("srv://_http._tcp.vllm.llm.svc.cluster.local") == DnsSource(
        "_http._tcp.vllm.llm.svc.cluster.local", None, Role.MIXED
    )


def test_addresses_and_records_of_a_name() -> None:
    async def run() -> None:
        here = await resolve(DnsSource("127.0.0.1", 8000, Role.MIXED))
        assert here == [ListedServer("mixed-127.0.0.1-8000", Role.MIXED, "http://127.0.0.1:8000")]
        assert await resolve(DnsSource("nobody.invalid", 8000, Role.MIXED)) == []
        records = [("vllm-0.llm.svc", 8000), ("vllm-1.llm.svc", 8001)]
        with nameserver(records) as port:
            source = DnsSource("_http._tcp.llm.svc", None, Role.MIXED, 5557)
            found = await resolve(source, [("127.0.0.1", port)])
            assert [server.place for server in found] == [
                "http://vllm-0.llm.svc:8000,tcp://vllm-0.llm.svc:5557",
                "http://vllm-1.llm.svc:8001,tcp://vllm-1.llm.svc:5557",
            ]
            records.clear()
            assert await resolve(source, [("127.0.0.1", port)]) == []
        with pytest.raises(SourceError, match="no nameserver"):
            await resolve(source, [])

    asyncio.run(run())


@given(st.binary(max_size=300))
def test_any_answer_is_records_or_one_error(data: bytes) -> None:
    query = srv_query("_http._tcp.vllm")
    head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 3, 0, 0) + query[12:]
    for answer in (data, head + data):
        try:
            for host, port in parse_srv(query, answer):
                assert host and 0 < port < 65536
        except SourceError:
            pass


# Who may join


def test_a_server_joins_at_once_and_leaves_when_it_stays_away() -> None:
    found = Membership()
    assert found.see([A, B], 0.0) == [JoinServer(A), JoinServer(B)]
    assert found.see([A], 1.0) == [], "DNS leaves out some for a moment"
    assert found.see([A], ABSENT_S) == [DrainServer(B)]
    assert found.joined == [A]


def test_one_that_flaps_is_held_off_longer_each_time() -> None:
    found, now_s = Membership(), 0.0
    waits = []
    for _ in range(6):
        assert JoinServer(A) in found.see([A], now_s)
        now_s += ABSENT_S
        assert found.see([], now_s) == [DrainServer(A)]
        left_s = now_s
        while JoinServer(A) not in found.see([A], now_s):
            now_s += 1.0
        found.see([], now_s)
        waits.append(now_s - left_s)
        now_s += ABSENT_S
        found.see([], now_s)
        now_s += HOLD_OFFS.delays_s[-1]
    assert (
        waits == sorted(waits)
        and waits[0] == HOLD_OFFS.delays_s[1]
        and waits[-1] == HOLD_OFFS.delays_s[-1]
    )


def test_one_that_stayed_long_may_come_back_at_once() -> None:
    found = Membership()
    found.see([A], 0.0)
    found.see([A], HOLD_OFFS.steady_s)
    assert found.see([], HOLD_OFFS.steady_s + ABSENT_S) == [DrainServer(A)]
    assert found.see([A], HOLD_OFFS.steady_s + ABSENT_S + 1) == [JoinServer(A)]


def test_another_address_under_a_name_is_another_server() -> None:
    found = Membership()
    found.see([A], 0.0)
    moved = ListedServer("a", Role.MIXED, "http://a:9000")
    assert found.see([moved], 1.0) == [DrainServer(A), JoinServer(moved)]


def test_there_is_a_limit_which_is_said_once() -> None:
    many = [ListedServer(f"s{n}", Role.MIXED, f"http://s{n}:1") for n in range(MAX_SERVERS + 2)]
    found = Membership()
    actions = found.see(many, 0.0)
    assert len(found.joined) == MAX_SERVERS and actions[-1] == TooManyServers(2)
    assert found.see(many, 1.0) == []


def test_a_server_that_is_held_off_is_said_once() -> None:
    found = Membership()
    found.see([A], 0.0)
    found.see([], ABSENT_S)
    said = [action for at in (4.0, 5.0) for action in found.see([A], at)]
    assert said == [HoldServerOff(A, ABSENT_S + HOLD_OFFS.delays_s[1] - 4.0)]


def test_a_listed_server_that_dies_again_and_again_is_held_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker waits before it joins again: not after the first death, then longer each time."""
    from moonpool.config.vllm import VllmAddress
    from moonpool.vllm import worker as vllm_worker

    slept: list[float] = []

    async def run() -> None:
        worker = vllm_worker.VllmWorker(
            Role.MIXED, InstanceId("v"), "here", b"s" * 16, VllmAddress("http://127.0.0.1:1")
        )
        num_lives = 0

        async def found() -> None:
            nonlocal num_lives
            num_lives += 1
            worker._gone = True

        class Link:
            def __init__(self, *_: object) -> None:
                self.heads, self.stopping = None, False

            def send(self, *_: object) -> None: ...

            async def run(self, *_: object) -> None:
                worker._gone = num_lives < 6

        async def sleep(seconds: float) -> None:
            if seconds in HOLD_OFFS.delays_s:
                slept.append(seconds)

        monkeypatch.setattr(worker, "_found", found)
        monkeypatch.setattr(worker, "_beat", lambda: asyncio.Event().wait())
        monkeypatch.setattr(vllm_worker, "HeadLink", Link)
        monkeypatch.setattr(vllm_worker.asyncio, "sleep", sleep)
        await worker.run("127.0.0.1", 1)

    asyncio.run(run())
    assert slept == list(HOLD_OFFS.delays_s[1:])


def test_each_data_parallel_rank_is_a_server() -> None:
    text = (
        "endpoints:\n- {name: a, address: 10.0.0.1, port: 8000, labels: {"
        "moonpool.dev/data-parallel-size: '2', moonpool.dev/kv-events-port: '5557',"
        " moonpool.dev/kv-replay-port: '5657'}}\n"
        "- {name: b, address: 10.0.0.2, port: 8000, labels: {moonpool.dev/data-parallel-size: 0}}\n"
    )
    servers, problems = parse_endpoints(text.encode())
    assert [(one.name, one.place) for one in servers] == [
        ("a.0", "http://10.0.0.1:8000@0,tcp://10.0.0.1:5557,tcp://10.0.0.1:5657"),
        ("a.1", "http://10.0.0.1:8000@1,tcp://10.0.0.1:5558,tcp://10.0.0.1:5658"),
    ]
    assert len(problems) == 1 and "no number of ranks" in problems[0]
    for one in servers:
        assert vllm_place(one.place).url == one.place.split(",")[0]
    source = parse_source("dns://llm:8000?ranks=4")
    assert isinstance(source, DnsSource) and source.ranks == 4

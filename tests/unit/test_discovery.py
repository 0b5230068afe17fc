"""Tests which vLLM servers are known, by successive files and answers of DNS, and which of them may
join."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config.rules import vllm_place
from moonpool.discovery import rank_counts, watch
from moonpool.discovery.dns_names import DnsName, DnsSettings, ask_srv, parse_srv, srv_query
from moonpool.discovery.endpoint import Endpoint, SourceError, endpoint_of
from moonpool.discovery.endpoints_file import parse_endpoints
from moonpool.discovery.membership import (
    HOLD_OFFS,
    DrainServer,
    HoldOff,
    HoldServerOff,
    JoinServer,
    Membership,
    TooManyServers,
)
from moonpool.discovery.source_text import DnsSource, parse_source
from moonpool.discovery.watch import MAX_SERVERS, Discovery
from moonpool.types import InstanceId, Role
from tests.live.test_discovery import nameserver
from tests.live.vllm_stub import VllmStub, stubs

A, B = (Endpoint(name=name, host=name, port=8000) for name in "ab")

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
    found, problems = parse_endpoints(LLM_D)
    assert problems == []
    assert [(each.name, each.role, each.place) for each in found.endpoints] == [
        ("vllm-0", Role.MIXED, "http://10.0.0.1:8000"),
        ("llm.vllm-1", Role.PREFILL, "http://10.0.0.2:8001,tcp://10.0.0.2:5557"),
        ("vllm-2", Role.DECODE, "http://[fd00::2]:8000"),
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
    found, (problem,) = parse_endpoints(text.encode())
    assert [server.name for server in found.endpoints] == ["b"]
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
            assert all(server.name for server in parse_endpoints(text)[0].endpoints)


# DNS:


def test_sources_are_read() -> None:
    assert parse_source("dns://vllm.llm.svc:8000?role=decode&events=5557") == DnsSource(
        "vllm.llm.svc", 8000, Role.DECODE, 5557
    )
    assert parse_source("srv://_http._tcp.vllm.llm.svc.cluster.local") == DnsSource(
        "_http._tcp.vllm.llm.svc.cluster.local", None, Role.MIXED
    )


def test_addresses_and_records_of_a_name() -> None:
    async def names(source: DnsSource, settings: DnsSettings | None = None) -> list[str]:
        heard = asyncio.Queue[list[str]]()
        follows = asyncio.create_task(
            DnsName(source, settings).follow(
                lambda found: heard.put_nowait([each.place for each in found.endpoints])
            )
        )
        try:
            return await asyncio.wait_for(heard.get(), 60)
        finally:
            follows.cancel()

    async def run() -> None:
        here = await names(DnsSource("127.0.0.1", 8000))
        assert here == ["http://127.0.0.1:8000"]
        assert await names(DnsSource("nobody.invalid", 8000)) == []
        records = [("127.0.0.1", 8000), ("127.0.0.2", 8001)]
        with nameserver(records) as port:
            source = DnsSource("_http._tcp.llm.svc", None, Role.MIXED, 5557)
            settings = DnsSettings((("127.0.0.1", port),))
            assert await names(source, settings) == [
                "http://127.0.0.1:8000,tcp://127.0.0.1:5557",
                "http://127.0.0.2:8001,tcp://127.0.0.2:5557",
            ]
            records.clear()
            assert await names(source, settings) == []
        with pytest.raises(SourceError, match="no nameserver"):
            await ask_srv(source.name, DnsSettings())

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


# Servers that may join:


def test_a_server_joins_and_leaves_at_once() -> None:
    found = Membership()
    assert found.see([A, B], 0.0) == [JoinServer(A), JoinServer(B)]
    assert found.see([A], 1.0) == [DrainServer(B)]
    assert found.joined == [A]


def test_one_that_flaps_is_held_off_longer_each_time() -> None:
    found, now_s = Membership(), 0.0
    waits = []
    for _ in range(6):
        assert JoinServer(A) in found.see([A], now_s)
        now_s += 3.0
        assert found.see([], now_s) == [DrainServer(A)]
        left_s = now_s
        while JoinServer(A) not in found.see([A], now_s):
            now_s += 1.0
        waits.append(now_s - left_s)
        found.see([], now_s)
        now_s += HOLD_OFFS.delays_s[-1]
    assert waits == sorted(waits) and waits[0] == 0.0 and waits[-1] == HOLD_OFFS.delays_s[-1]


@given(st.lists(st.floats(0.0, 2 * HOLD_OFFS.steady_s), max_size=20))
def test_a_hold_off_is_bounded_and_a_long_stay_ends_it(stays_s: list[float]) -> None:
    found = HoldOff()
    for stay_s in stays_s:
        hold_s = found.after_stay(stay_s)
        assert 0.0 <= hold_s <= HOLD_OFFS.delays_s[-1]
        assert hold_s == 0.0 or stay_s < HOLD_OFFS.steady_s
    assert found.after_stay(HOLD_OFFS.steady_s) == found.after_stay(1.0) == 0.0
    assert found.after_stay(1.0) == HOLD_OFFS.delays_s[1]


def test_one_that_stayed_long_may_come_back_at_once() -> None:
    found = Membership()
    found.see([A], 0.0)
    found.see([A], HOLD_OFFS.steady_s)
    assert found.see([], HOLD_OFFS.steady_s + 3) == [DrainServer(A)]
    assert found.see([A], HOLD_OFFS.steady_s + 4) == [JoinServer(A)]


def test_another_address_under_a_name_is_another_server() -> None:
    found = Membership()
    found.see([A], 0.0)
    moved = Endpoint(name="a", host="a", port=9000)
    assert found.see([moved], 1.0) == [DrainServer(A), JoinServer(moved)]


def test_one_that_crashes_and_is_started_elsewhere_each_time_is_held_off() -> None:
    found = Membership()
    places = [Endpoint(name="a", host=f"10.0.0.{number}", port=8000) for number in range(4)]
    found.see(places[:1], 0.0)
    assert found.see([places[1]], 3.0) == [DrainServer(places[0]), JoinServer(places[1])]
    first_s, second_s = HOLD_OFFS.delays_s[1:3]
    left, held = found.see([places[2]], 6.0)
    assert (left, held) == (DrainServer(places[1]), HoldServerOff(places[2], first_s))
    assert found.see([places[2]], 6.0 + first_s) == [JoinServer(places[2])]
    assert HoldServerOff(places[3], second_s) in found.see([places[3]], 9.0 + first_s)


def test_there_is_a_limit_which_is_said_once() -> None:
    many = [Endpoint(name=f"s{n}", host=f"s{n}", port=1) for n in range(MAX_SERVERS + 2)]
    found = Membership(MAX_SERVERS)
    actions = found.see(many, 0.0)
    assert len(found.joined) == MAX_SERVERS and actions[-1] == TooManyServers(2)
    assert found.see(many, 1.0) == []


def test_a_server_that_is_held_off_is_said_once() -> None:
    found = Membership()
    for left_s in (1.0, 2.0):
        found.see([A], left_s - 1.0)
        found.see([], left_s)
    said = [action for at in (4.0, 5.0) for action in found.see([A], at)]
    assert said == [HoldServerOff(A, 2.0 + HOLD_OFFS.delays_s[1] - 4.0)]


def test_what_serves_already_stays_until_all_sources_are_read(tmp_path: Path) -> None:
    """If a source cannot be read after an upgrade, no server may be drained."""
    late, there = tmp_path / "late.yaml", tmp_path / "there.yaml"
    there.write_text("endpoints: [{name: b, address: b, port: 8000}]")

    async def run() -> None:
        heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        discovery = Discovery(
            [str(late), str(there)],
            lambda server: heard.put_nowait(("join", server.name)),
            lambda server: heard.put_nowait(("drain", server.name)),
        )
        discovery.membership.adopt([endpoint_of("a", Role.MIXED, A.place)], 0.0)
        running = asyncio.create_task(discovery.run())
        async with asyncio.timeout(60):
            assert await heard.get() == ("join", "b")
            assert heard.empty()
            late.write_text("endpoints: []")
            assert await heard.get() == ("drain", "a")
        running.cancel()

    asyncio.run(run())


@given(
    st.sampled_from(["h", "10.0.0.1", "fd00::1"]),
    st.integers(1, 65000),
    st.integers(0, 65000),
    st.integers(1, 3),
)
def test_a_place_is_read_as_the_endpoint_that_it_is_of(
    host: str, port: int, events: int, num_ranks: int
) -> None:
    whole = Endpoint(name="a", host=host, port=port, events_port=events, num_ranks=num_ranks)
    for rank in whole.ranks():
        assert endpoint_of(rank.name, rank.role, rank.place) == rank
        assert vllm_place(rank.place).url == rank.place.split(",")[0]


def test_a_listed_server_that_dies_again_and_again_is_held_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker waits before it joins again. It does not wait after the first death, and then longer
    each time."""
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

        class Link:
            def __init__(self, *_: object) -> None:
                self.heads, self.stopping = None, False

            def send(self, *_: object) -> None: ...

            def stop(self, *_: object) -> None: ...

            async def run(self, *_: object) -> None:
                if num_lives < 6:
                    worker.leave_gone()

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
    found, problems = parse_endpoints(text.encode())
    servers = [rank for each in found.endpoints for rank in each.ranks()]
    assert [(one.name, one.place) for one in servers] == [
        ("a.0", "http://10.0.0.1:8000@0,tcp://10.0.0.1:5557,tcp://10.0.0.1:5657"),
        ("a.1", "http://10.0.0.1:8000@1,tcp://10.0.0.1:5558,tcp://10.0.0.1:5658"),
    ]
    assert len(problems) == 1 and "no number of ranks" in problems[0]
    for one in servers:
        assert vllm_place(one.place).url == one.place.split(",")[0]
    source = parse_source("dns://llm:8000?ranks=4")
    assert isinstance(source, DnsSource) and source.ranks == 4


def test_a_server_is_asked_for_its_ranks_as_long_as_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_counts, "LOOK_S", 0.02)
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    names: list[str] = []
    known: list[set[str]] = []

    async def run() -> None:
        with stubs(VllmStub()) as (stub,):
            stub.num_ranks = 2
            path = tmp_path / "servers.yaml"
            labels = "labels: {moonpool.dev/data-parallel-size: all}"
            place = f"name: a, address: 127.0.0.1, port: {stub.port}"
            path.write_text(f"endpoints:\n- {{{place}, {labels}}}\n")
            found = Discovery(
                [str(path)], lambda e: names.append(e.name), lambda e: names.remove(e.name)
            )
            running = asyncio.create_task(found.run())
            for count in (2, 4, 1):
                stub.num_ranks = count
                async with asyncio.timeout(60):
                    while len(names) != count:
                        await asyncio.sleep(0.02)
                known.append(set(names))
            stub.refuses_metrics = True
            await asyncio.sleep(0.2)
            known.append(set(names))
            running.cancel()

    asyncio.run(run())
    assert known == [{"a.0", "a.1"}, {f"a.{n}" for n in range(4)}, {"a.0"}, {"a.0"}]


def test_engines_are_counted_in_their_order() -> None:
    line = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="9"}} 1.0\n'
    text = "".join(line.format(n) for n in (10, 9, 8)) + 'vllm:other{engine="3"} 1.0\n'
    assert rank_counts.engines_in(text) == ("8", "9", "10")
    assert rank_counts.engines_in("") == ()

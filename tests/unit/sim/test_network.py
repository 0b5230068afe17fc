"""Tests shared links against an exact textbook reference, and with small cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf, nan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.sim.clock import Clock, Priority
from moonpool.sim.network import Flow, FlowState, Link, Network

NEVER = Fraction(10**30)
# Each change is (time, kind, whom, number, number, path, closed). The times are such that no flow
# ends at one by chance.
Change = tuple[Fraction, str, int, int, int, tuple[int, ...]]


@dataclass
class RefFlow:
    path: tuple[int, ...]
    left: Fraction
    limit: Fraction
    ready_s: Fraction
    rate: Fraction = Fraction(0)
    moved: Fraction = Fraction(0)
    over_s: Fraction | None = None
    cancelled: bool = False


@dataclass
class Reference:
    """Computes the rates of all flows again at each change, in exact fractions."""

    capacity: list[Fraction]
    now: Fraction = Fraction(0)
    flows: list[RefFlow] = field(default_factory=list)

    def share_out(self) -> None:
        spare = list(self.capacity)
        rising = []
        for flow in self.flows:
            flow.rate = Fraction(0)
            if flow.over_s is None and flow.left > 0 and flow.ready_s <= self.now:
                rising.append(flow)
        level = Fraction(0)
        while rising:
            counts = [sum(number in f.path for f in rising) for number in range(len(spare))]
            rise = min([s / n for s, n in zip(spare, counts, strict=True) if n])
            rise = min([rise, *(f.limit - level for f in rising)])
            level += rise
            spare = [s - rise * n for s, n in zip(spare, counts, strict=True)]
            for flow in rising:
                flow.rate = level
            full = [number for number in range(len(spare)) if spare[number] == 0]
            rising = [
                f
                for f in rising
                if f.limit > level and not any(number in full for number in f.path)
            ]

    def run(self, until: Fraction) -> None:
        while True:
            for flow in self.flows:
                done = flow.left == 0 and flow.ready_s <= self.now
                if flow.over_s is None and done:
                    flow.over_s = self.now
            self.share_out()
            next_s = until
            for flow in self.flows:
                if flow.rate > 0:
                    next_s = min(next_s, self.now + flow.left / flow.rate)
                if flow.ready_s > self.now and flow.over_s is None:
                    next_s = min(next_s, flow.ready_s)
            for flow in self.flows:
                moved = flow.rate * (next_s - self.now)
                flow.left -= moved
                flow.moved += moved
            if next_s == self.now == until or all(f.over_s is not None for f in self.flows):
                return
            self.now = next_s


def change(flow: RefFlow | None, reference: Reference, what: Change) -> None:
    """Makes the same change to the reference."""
    time_s, kind, whom, first, second, path = what
    if kind == "start":
        limit = Fraction(second) if second else NEVER
        latency_s = Fraction(whom, 7)
        reference.flows.append(RefFlow(path, Fraction(first), limit, time_s + latency_s))
    elif flow is not None and flow.over_s is None:
        flow.over_s, flow.cancelled = time_s, True


@dataclass
class Subject:
    network: Network
    links: list[Link]
    flows: list[Flow] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)

    def change(self, what: Change) -> None:
        _, kind, whom, first, second, path = what
        flow = self.flows[whom % len(self.flows)] if self.flows else None
        if kind == "start":
            number = len(self.flows)

            def on_end(flow: Flow) -> None:
                assert flow is self.flows[number] and number not in self.ended_s
                self.ended_s[number] = self.network.clock.now

            links = tuple(self.links[number] for number in path)
            limit = float(second) if second else inf
            self.flows.append(self.network.start(links, first, on_end, limit, whom / 7))
        elif flow is not None:
            flow.cancel()


def check_fair(links: list[Link], flows: list[Flow]) -> None:
    """Asserts that the rates are feasible, and each flow is at its limit or among the fastest on a
    full link."""
    moving = [flow for flow in flows if flow.state is FlowState.MOVING]
    rates = {id(flow): flow.rate_bytes_per_s for flow in moving}
    total = {id(link): 0.0 for link in links}
    top = dict(total)
    for flow in moving:
        for link in flow.path:
            total[id(link)] += rates[id(flow)]
            top[id(link)] = max(top[id(link)], rates[id(flow)])
    for link in links:
        assert total[id(link)] <= link.bytes_per_s * (1 + 1e-11)
    for flow in moving:
        rate = rates[id(flow)]
        assert rate <= flow.limit_bytes_per_s
        assert rate == flow.limit_bytes_per_s or any(
            total[id(link)] >= link.bytes_per_s * (1 - 1e-11)
            and rate >= top[id(link)] * (1 - 1e-11)
            for link in flow.path
        )


def check_conserved(links: list[Link], flows: list[Flow]) -> None:
    for link in links:
        carried = sum(flow.moved_bytes for flow in flows if link in flow.path)
        assert link.bytes_carried == pytest.approx(carried, rel=1e-12, abs=1e-6)


NUM_LINKS = 5


@st.composite
def changes(draw: st.DrawFn) -> list[Change]:
    made = []
    time_s = Fraction(0)
    for _ in range(draw(st.integers(2, 25))):
        time_s += draw(st.integers(0, 3)) * Fraction(100_003, 99_991)
        kinds = ["start"] * 4 + ["cancel"]
        path = draw(st.lists(st.integers(0, NUM_LINKS - 1), min_size=1, max_size=3, unique=True))
        number = draw(st.integers(0, 60))
        second = draw(st.integers(0, 12))
        kind = draw(st.sampled_from(kinds))
        whom = draw(st.integers(0, 12))
        made.append((time_s, kind, whom, number, second, tuple(path)))
    return made


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=NUM_LINKS, max_size=NUM_LINKS), changes())
@example(  # a flow without bytes that is given up before its start
    [1] * NUM_LINKS,
    [
        (Fraction(0), "start", 1, 0, 0, (0,)),
        (Fraction(0), "start", 0, 0, 0, (0,)),
        (Fraction(0), "start", 0, 0, 0, (0,)),
        (Fraction(0), "cancel", 0, 0, 0, (0,)),
    ],
)
def test_as_the_textbook_has_it(capacity: list[int], made: list[Change]) -> None:
    clock = Clock()
    network = Network(clock)
    links = [network.add_link(f"link {n}", float(bps)) for n, bps in enumerate(capacity)]
    subject = Subject(network, links)
    reference = Reference([Fraction(bps) for bps in capacity])
    num_flows = sum(kind == "start" for _, kind, *_ in made)
    for what in made:
        reference.run(what[0])
        clock.run(max(float(what[0]), clock.now))
        flows = reference.flows
        change(flows[what[2] % len(flows)] if flows else None, reference, what)
        subject.change(what)
        check_fair(links, subject.flows)
        check_conserved(links, subject.flows)
    reference.run(NEVER)
    clock.run()
    assert num_flows == len(subject.flows)
    for number, (expected, flow) in enumerate(zip(reference.flows, subject.flows, strict=True)):
        assert expected.over_s is not None
        assert flow.moved_bytes == pytest.approx(float(expected.moved), rel=1e-9, abs=1e-9)
        if expected.cancelled:
            assert flow.state is FlowState.CANCELLED and number not in subject.ended_s
        else:
            assert flow.state is FlowState.ENDED and flow.moved_bytes == flow.num_bytes
            assert subject.ended_s[number] == pytest.approx(float(expected.over_s), rel=1e-9)
    check_conserved(links, subject.flows)
    assert all(link.num_flows == 0 and link.num_bound == 0 for link in links)
    assert len(clock) == 0


class Bench:
    """Holds a network, and the end times of flows."""

    def __init__(self, **bytes_per_s: float) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.link = {name: self.network.add_link(name, bps) for name, bps in bytes_per_s.items()}
        self.ended_s: dict[str, float] = {}

    def send(
        self,
        name: str,
        path: str,
        num_bytes: int,
        limit: float = inf,
        latency_s: float = 0.0,
    ) -> Flow:
        def on_end(_: Flow) -> None:
            assert name not in self.ended_s
            self.ended_s[name] = self.clock.now

        links = tuple(self.link[part] for part in path.split())
        return self.network.start(links, num_bytes, on_end, limit, latency_s)

    def at(self, time_s: float, callback: Callable[..., object], *args: object) -> None:
        self.clock.at(time_s, Priority.TICK, callback, *args)


def test_a_busy_holder_slows_a_fetch_and_another_holder_does_not() -> None:
    bench = Bench(out_a=100.0, out_b=100.0, in_1=100.0, in_2=100.0, in_3=100.0)
    bench.send("alone", "out_b in_3", 1000)
    bench.send("first", "out_a in_1", 1000)
    bench.send("second", "out_a in_2", 1000)
    bench.clock.run()
    assert bench.ended_s == {"alone": 10.0, "first": 20.0, "second": 20.0}


def test_a_late_comer_halves_the_rest() -> None:
    bench = Bench(out=100.0, in_1=100.0, in_2=100.0)
    bench.send("early", "out in_1", 1000)
    bench.at(5.0, bench.send, "late", "out in_2", 1000)
    bench.clock.run()
    assert bench.ended_s == {"early": 15.0, "late": 20.0}


def test_what_a_limit_leaves_goes_to_the_others() -> None:
    bench = Bench(out=100.0, in_1=100.0, in_2=100.0, in_3=100.0)
    slow = bench.send("slow", "out in_1", 100, limit=10.0)
    others = [bench.send(f"fast {n}", f"out in_{n}", 900) for n in (2, 3)]
    assert [flow.rate_bytes_per_s for flow in (slow, *others)] == [10.0, 45.0, 45.0]
    bench.clock.run()
    assert bench.ended_s["slow"] == 10.0


def test_a_chain_of_bottlenecks_is_followed_to_its_end() -> None:
    """Flows 1 and 2 share link a (10), 2 and 3 share b (30), 3 and 4 share c (100). The end of flow
    1 changes the rate of flow 4, by way of 2 and 3."""
    bench = Bench(a=10.0, b=30.0, c=100.0)
    flows = [bench.send(str(n), path, 10**6) for n, path in enumerate(["a", "a b", "b c", "c"])]
    assert [flow.rate_bytes_per_s for flow in flows] == [5.0, 5.0, 25.0, 75.0]
    flows[0].cancel()
    assert [flow.rate_bytes_per_s for flow in flows] == [0.0, 10.0, 20.0, 80.0]


def test_who_is_overtaken_on_a_full_link_is_rated_too() -> None:
    """At the same moment, h gains on m1 as much as k loses on m2. So l stays full, although g
    should get more there."""
    bench = Bench(l=13.0, m1=16.0, m2=7.0, q=12.0)
    g, h, k = (bench.send(path, path, 10**6) for path in ("l", "m1 l", "m2 l"))
    for number in range(4):
        bench.send(f"over m1 {number}", "q m1", 10**6)
    assert [flow.rate_bytes_per_s for flow in (g, h, k)] == [4.5, 4.0, 4.5]
    for number in range(20):
        bench.send(f"on q {number}", "q", 10**6)
    for number in range(3):
        bench.send(f"on m2 {number}", "m2", 10**6)
    assert [flow.rate_bytes_per_s for flow in (g, h, k)] == [5.625, 5.625, 1.75]


def test_started_and_cancelled_in_one_instant_it_was_never_there() -> None:
    bench = Bench(out=100.0)
    bench.send("stays", "out", 1000)
    bench.send("gone", "out", 1000).cancel()
    bench.clock.run()
    assert bench.ended_s == {"stays": 10.0} and bench.link["out"].bytes_carried == 1000


def test_cancel_releases_bandwidth_without_a_callback() -> None:
    bench = Bench(out=100.0)
    gone = bench.send("gone", "out", 1000)
    bench.send("stays", "out", 1000)
    bench.at(4.0, gone.cancel)
    bench.clock.run()
    assert bench.ended_s == {"stays": 12.0}
    assert gone.state is FlowState.CANCELLED and gone.moved_bytes == 200.0
    assert bench.link["out"].bytes_carried == 1200.0
    gone.cancel()
    assert len(bench.clock) == 0


@pytest.mark.parametrize("latency_s", [0.0, 3.0])
def test_nothing_to_send_ends_after_the_latency_never_inside_start(latency_s: float) -> None:
    bench = Bench(out=100.0)
    flow = bench.send("empty", "out", 0, latency_s=latency_s)
    assert not bench.ended_s
    bench.clock.run()
    assert bench.ended_s == {"empty": latency_s} and flow.state is FlowState.ENDED
    assert bench.link["out"].peak_flows == 0


def test_no_share_is_taken_during_the_latency() -> None:
    bench = Bench(out=100.0)
    bench.send("now", "out", 1000)
    bench.send("later", "out", 1000, latency_s=5.0)
    bench.clock.run()
    assert bench.ended_s == {"now": 15.0, "later": 20.0}


def test_cancelled_during_the_latency_it_never_moves() -> None:
    bench = Bench(out=100.0)
    bench.send("gone", "out", 1000, latency_s=5.0).cancel()
    bench.clock.run()
    assert bench.ended_s == {} and bench.link["out"].bytes_carried == 0


def test_counters_of_a_link() -> None:
    bench = Bench(out=100.0, in_1=100.0)
    bench.send("a", "out in_1", 100)
    bench.send("b", "out", 100)
    bench.at(5.0, bench.send, "c", "out", 50)
    bench.clock.run(until=1.0)
    assert bench.link["out"].bytes_carried == 100.0 and bench.link["in_1"].bytes_carried == 50.0
    bench.clock.run(until=10.0)
    out = bench.link["out"]
    assert (out.bytes_carried, out.busy_s, out.peak_flows, out.num_flows) == (250, 2.5, 2, 0)


def test_who_is_not_concerned_is_not_rerated() -> None:
    bench = Bench(**{f"link_{n}": 100.0 for n in range(50)})
    for number in range(50):
        bench.send(str(number), f"link_{number}", 10**6)
    bench.clock.run(until=1.0)
    before = bench.network.num_rerated
    bench.send("one more", "link_7", 10**6)
    bench.clock.run(until=2.0)
    assert bench.network.num_rerated - before == 2


def test_with_room_to_spare_only_the_new_one_is_rated() -> None:
    bench = Bench(out=100.0)
    flows = [bench.send(str(number), "out", 1000, limit=10.0) for number in range(10)]
    assert bench.network.num_rerated == 10
    flows[3].cancel()
    bench.send("in its place", "out", 1000, limit=10.0)
    assert bench.network.num_rerated == 11
    bench.clock.run()
    assert set(bench.ended_s.values()) == {100.0} and bench.network.num_rerated == 11


def test_many_starts_and_ends_at_one_instant_are_shared_out_once() -> None:
    bench = Bench(out=100.0)
    for number in range(200):
        bench.send(str(number), "out", 1000)
    bench.clock.run()
    assert set(bench.ended_s.values()) == {2000.0} and bench.network.num_rerated == 200


def test_thousands_of_rerates_do_not_drift() -> None:
    """Runs 10,000 short flows beside a long flow; the sum over a link stays exact."""
    bench = Bench(out=1e9, near=0.7e9)
    rng = random.Random(4)
    long_bytes = 10**14
    bench.send("long", "out near", long_bytes)
    num_short, since_s = 0, 0.0
    alone_s = company_s = 0.0

    def book(more: int) -> None:
        nonlocal num_short, since_s, alone_s, company_s
        if num_short:
            company_s += bench.clock.now - since_s
        else:
            alone_s += bench.clock.now - since_s
        num_short, since_s = num_short + more, bench.clock.now

    def start(num_bytes: int) -> None:
        book(1)
        bench.network.start((bench.link["out"],), num_bytes, lambda _: book(-1))

    time_s, total = 0.0, long_bytes
    for _ in range(10_000):
        time_s += rng.random() * 2
        num_bytes = rng.randrange(1, 10**9)
        total += num_bytes
        bench.at(time_s, start, num_bytes)
    bench.clock.run()
    book(0)
    assert num_short == 0 and bench.ended_s["long"] == bench.clock.now > time_s
    assert bench.link["near"].bytes_carried == long_bytes
    assert bench.link["out"].bytes_carried == total
    assert bench.network.num_rerated > 20_000 and company_s > 1000
    # The long flow alone fills `near`; with the other flows it fills `out`.
    assert 0.7e9 * alone_s + 1e9 * company_s == pytest.approx(total, rel=1e-12)


def random_load(num_links: int, num_flows: int, num_ends: int, seed: int) -> Bench:
    """Keeps `num_flows` flows under way, each from one link to another, until `num_ends` have
    ended."""
    bench = Bench(**{f"l{n}": 25e9 for n in range(num_links)})
    links = list(bench.link.values())
    rng = random.Random(seed)
    left = num_ends

    def send(_: Flow | None = None) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            path = tuple(rng.sample(links, 2))
            bench.network.start(path, rng.randrange(10**8, 10**10), send)

    for _ in range(num_flows):
        send()
    bench.clock.run()
    assert left == -num_flows
    return bench


def test_same_seed_same_history_to_the_last_bit() -> None:
    first, second = (random_load(20, 60, 1000, seed=3) for _ in range(2))
    assert first.clock.now == second.clock.now > 0
    assert first.network.num_rerated == second.network.num_rerated
    assert [link.busy_s for link in first.link.values()] == [
        link.busy_s for link in second.link.values()
    ]


@pytest.mark.long
def test_a_thousand_links_do_not_make_every_change_a_change_of_all() -> None:
    bench = random_load(1000, 2000, 4000, seed=5)
    assert bench.network.num_rerated < 4000 * 2 * 100


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda b: b.network.start((), 1, print), "a path must name at least one link"),
        (lambda b: b.send("x", "out out", 1), "each link once"),
        (lambda b: b.send("x", "out", -1), "cannot send -1 bytes"),
        (lambda b: b.send("x", "out", nan), "cannot send nan bytes"),
        (lambda b: b.send("x", "out", 1, limit=nan), "limited to nan"),
        (lambda b: b.send("x", "out", 1, latency_s=-1.0), "cannot start after -1.0 s"),
        (lambda b: b.send("x", "out", 1, latency_s=nan), "cannot start after nan s"),
        (lambda b: b.network.add_link("out", 1.0), "there is a link 'out' already"),
        (lambda b: b.network.add_link("y", inf), "cannot have inf B/s"),
        (lambda b: b.network.add_link("y", nan), "cannot have nan B/s"),
        (lambda b: b.send("x", "out", 1, limit=-1.0), "limited to -1.0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[Bench], object], said: str) -> None:
    bench = Bench(out=100.0)
    with pytest.raises(ValueError, match=said):
        make(bench)
    assert list(bench.link) == ["out"]

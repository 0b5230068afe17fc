"""Tests the order of waiting prompts: by priority, fairness among tenants and arrival, so that no
prompt starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId, StartPrefill
from moonpool.scheduler.actions import RunStep, StepEnded, WorkerEvent
from moonpool.scheduler.batching import queue_order
from moonpool.scheduler.batching.queue_order import MAX_ABSENT, QueueOrder, TenantAccounts
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import Role, SamplingParams, Token
from moonpool_lab.solo import solo_attempt

CHUNK = 16
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
)
COST = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.0, 0.01, 0.0))


@dataclass
class Bench:
    """Runs a mixed instance; each step takes a second."""

    num_blocks: int = 4000
    now: float = 0.0
    step: RunStep | None = None
    served: Counter[str] = field(default_factory=Counter)
    # the attempts in the order in which their prefills end
    order: list[str] = field(default_factory=list)
    history: list[list[tuple[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = InstanceConfig(chunk_tokens=CHUNK, max_sequences=1000, prefix_caching=False)
        self.instance = Instance(config, LAYOUT, self.num_blocks, Role.MIXED, COST, (0,))

    def start(
        self,
        name: str,
        num_tokens: int = CHUNK,
        *,
        tenant: str = "",
        priority: int = 0,
        share: float = 1.0,
        timeout_s: float = 1e6,
        max_tokens: int = 1,
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        more = {"tenant": tenant, "priority": priority, "share": share, "timeout_s": timeout_s}
        work = solo_attempt(name, range(num_tokens), sampling, use_cache=False, **more)
        self._handle(StartPrefill(attempt=work))

    def turn(self) -> bool:
        """Ends the step in progress. Returns False if no step is in progress."""
        if self.step is None:
            return False
        entries, self.step = self.step.entries, None
        self.now += 1.0
        for entry in entries:
            self.served[entry.attempt_id] += len(entry.new_token_ids)
            if entry.draw is not None and not entry.generated:
                self.order.append(entry.attempt_id)
        tokens = tuple(None if e.draw is None else Token(7) for e in entries)
        self._handle(StepEnded(tokens, 1.0))
        return True

    def run(self) -> list[str]:
        while self.turn():
            pass
        assert not self.instance.requests and self.instance.pool.owners() == {}
        self.instance.validate()
        return self.order

    def _handle(self, event: WorkerEvent) -> None:
        for action in self.instance.handle(event, self.now):
            if isinstance(action, RunStep):
                assert self.step is None
                self.step = action
                self.history.append([(e.attempt_id, len(e.new_token_ids)) for e in action.entries])
        self.instance.validate()


def test_a_lower_value_overtakes_even_a_prompt_that_is_being_computed() -> None:
    bench = Bench()
    bench.start("long", 10 * CHUNK, priority=1)
    bench.start("later", priority=2)
    bench.start("urgent", priority=-3)
    bench.start("usual")
    assert bench.run() == ["urgent", "usual", "long", "later"]
    assert [name for ((name, _),) in bench.history[:3]] == ["long", "urgent", "usual"]


def test_a_tenant_with_one_prompt_does_not_wait_for_the_prompts_of_another() -> None:
    bench = Bench()
    for number in range(20):
        bench.start(f"flood{number}", 4 * CHUNK, tenant=f"flood/salt{number}")
    bench.turn()
    bench.start("small", 2 * CHUNK, tenant="small")
    order = bench.run()
    assert order[0] == "small"
    assert order[1:] == [f"flood{number}" for number in range(20)], "a tenant's own keep order"


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_tenants_that_all_flood_get_tokens_by_share(share: float) -> None:
    bench = Bench()
    for number in range(150):
        bench.start(f"a{number}", tenant="a", share=share)
        bench.start(f"b{number}", tenant="b")
    for _ in range(100):
        bench.turn()
    given = Counter[str]()
    for name, num_tokens in bench.served.items():
        given[name[0]] += num_tokens
    assert given["a"] / given["b"] == pytest.approx(share, rel=0.1)


def test_an_idle_tenant_saves_up_no_more_than_its_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    credit_chunks = 8
    monkeypatch.setattr(queue_order, "CREDIT_TOKENS", credit_chunks * CHUNK)
    bench = Bench()
    bench.start("known", tenant="idle")
    for number in range(300):
        bench.start(f"busy{number}", tenant="busy")
    for _ in range(100):
        bench.turn()
    for number in range(100):
        bench.start(f"idle{number}", tenant="idle")
    for _ in range(credit_chunks + 5):
        bench.turn()
    at_once = [name for ((name, _),) in bench.history[101 : 101 + credit_chunks + 4]]
    assert 0 < sum(name.startswith("busy") for name in at_once) <= 4
    for _ in range(40):
        bench.turn()
    even = [name[:4] for ((name, _),) in bench.history[-40:]]
    assert even.count("busy") == 20


def test_a_request_of_the_worst_priority_starts_after_half_of_its_time() -> None:
    bench = Bench()
    bench.start("urgent", priority=-5, tenant="b")
    bench.start("patient", 2 * CHUNK, priority=9, tenant="a", timeout_s=60.0)
    for number in range(100):  # more prompts than the instance can ever compute
        bench.start(f"urgent{number}-0", priority=-5, tenant="b")
        bench.start(f"urgent{number}-1", priority=-5, tenant="b")
        bench.turn()
        if "patient" in bench.order:
            break
    assert 30.0 <= bench.now <= 36.0


def test_the_youngest_of_the_worst_priority_is_preempted() -> None:
    bench = Bench(num_blocks=12)
    bench.start("worst", 12, priority=5, max_tokens=30)
    bench.start("usual", 12, max_tokens=30)
    while bench.instance.counters.get("preemptions", 0) == 0:
        assert bench.turn()
    (preempted,) = bench.instance._scheduler.waiting
    assert preempted.attempt_id == "worst"
    assert bench.run()[:2] == ["worst", "usual"]


Jobs = list[tuple[int, str, int, int]]
JOBS = st.lists(
    st.tuples(
        st.integers(0, 4),  # number of steps before the prompt arrives
        st.sampled_from(("a", "b", "c")),
        st.integers(-2, 2),
        st.integers(1, 5 * CHUNK),
    ),
    max_size=25,
)


def played(jobs: Jobs) -> Iterator[Bench]:
    """Yields the bench after each arrival and each step."""
    bench = Bench()
    for number, (pause, tenant, priority, num_tokens) in enumerate(jobs):
        for _ in range(pause):
            bench.turn()
            yield bench
        bench.start(f"{number}", num_tokens, tenant=tenant, priority=priority, max_tokens=3)
        yield bench
    while bench.turn():
        yield bench
    bench.run()


@given(JOBS)
def test_no_prompt_is_computed_while_one_of_a_better_priority_gets_nothing(jobs: Jobs) -> None:
    num_steps = 0
    for bench in played(jobs):
        if len(bench.history) == num_steps:
            continue  # this prompt arrives during a step
        num_steps = len(bench.history)
        here = bench.instance.requests
        in_step = dict(bench.history[-1])
        computed = [here[AttemptId(name)] for name in in_step]
        prefills = [r for r in computed if not r.tokens.num_generated]
        left_out = [r for r in here.values() if r.attempt_id not in in_step]
        for request in left_out:
            if request.num_scheduled < request.attempt.num_prompt_tokens:
                assert all(p.attempt.priority <= request.attempt.priority for p in prefills)


@given(JOBS)
def test_one_tenant_with_one_priority_has_the_order_of_arrival(jobs: Jobs) -> None:
    """With one tenant and one priority, the steps must be those of a scheduler without these
    rules."""
    alike: Jobs = [(pause, "a", 1, num_tokens) for pause, _, _, num_tokens in jobs]
    histories = []
    for is_plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_plain:
                patch.setattr(QueueOrder, "is_plain", property(lambda _: False))
            bench = Bench()
            for number, (pause, tenant, priority, num_tokens) in enumerate(alike):
                for _ in range(pause):
                    bench.turn()
                bench.start(f"{number}", num_tokens, tenant=tenant, priority=priority, max_tokens=3)
            while bench.turn():
                pass
        histories.append(bench.history)
        assert bench.order == [str(number) for number in range(len(alike))]
    assert histories[0] == histories[1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100_000)), max_size=60))
def test_a_tenant_that_returns_is_within_its_credit_of_the_others(
    visits: list[tuple[str, int]],
) -> None:
    accounts = TenantAccounts(500.0)
    present: dict[str, float] = {}
    for tenant, num_tokens in visits:
        if tenant in present:
            accounts.leave(tenant)
            del present[tenant]
            continue
        account = accounts.enter(tenant, 2.0)
        if present:
            assert min(present.values()) - 500.0 <= account.served <= max(present.values()) + 500.0
        account.charge(num_tokens)
        present[tenant] = account.served
    assert accounts.num_present == len(present)


def test_counters_of_tenants_that_left_are_bounded() -> None:
    accounts = TenantAccounts(500.0)
    for number in range(3 * MAX_ABSENT):
        accounts.enter(f"tenant{number}", 1.0).charge(7)
        accounts.leave(f"tenant{number}")
    known = [n for n in range(3 * MAX_ABSENT) if accounts.served(f"tenant{n}")]
    assert len(known) == MAX_ABSENT and accounts.num_present == 0

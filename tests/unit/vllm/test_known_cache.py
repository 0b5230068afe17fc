"""Tests the assumed content of a vLLM server's cache: by its events while they are right, and by
assumption otherwise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.types import BlockKey
from moonpool.vllm.block_names import ExternalBlocksCleared, ExternalBlocksStored, ForeignEvent
from moonpool.vllm.known_cache import DUE_S, LEAST_JUDGED, KnownCache

LAYOUT = BlockLayout(
    model_fingerprint="vllm m",
    dtype="bfloat16",
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(number * 8, number * 8 + 8))  # two blocks


def keys(number: int) -> list[BlockKey]:
    return block_keys(prompt(number), 4, root_key(LAYOUT.fingerprint, ""))


def stored(number: int, block_tokens: int = 4) -> ExternalBlocksStored:
    hashes = tuple(number * 10 + i for i in range(8 // block_tokens))
    return ExternalBlocksStored(hashes=hashes, parent=None, token_ids=prompt(number))


class Server:
    """A cache that is followed, and the announcements of its follower to the head."""

    def __init__(self, publishes_events: bool = True, caches: bool = True) -> None:
        self.cache = KnownCache(LAYOUT, 64, publishes_events, caches)
        self.told: set[BlockKey] = set()
        self.now = 0.0

    def compute(self, number: int, events: tuple[ForeignEvent, ...] | None = None) -> None:
        """Computes a prompt, with its events unless the test gives others."""
        if events is None:
            events = (stored(number),)
        if events:
            self.cache.hear(events, False, self.now)
        self.cache.note_computed(keys(number), self.now, True)
        self.look()

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        changed = self.cache.judge(self.now)
        self.look()
        return changed

    def look(self) -> None:
        gained, lost = self.cache.take_changes()
        assert not self.told & set(gained)
        assert self.told >= set(lost)
        self.told = (self.told | set(gained)) - set(lost)
        assert self.told == set(self.cache.keys)


def test_events_that_name_each_prompt_are_used() -> None:
    server = Server()
    for number in range(10):
        server.compute(number)
    assert not server.wait(2 * DUE_S)
    assert server.cache.source == "events"
    server.cache.hear((ExternalBlocksCleared(),), False, server.now)
    server.look()
    assert not server.told


def test_until_the_first_event_the_prompts_are_assumed() -> None:
    server = Server()
    server.compute(0, events=())
    assert server.told == set(keys(0))
    server.cache.hear((stored(1),), False, server.now)
    server.look()
    assert server.told == set(keys(1))


def test_events_that_never_come_are_distrusted_once() -> None:
    server = Server()
    for number in range(LEAST_JUDGED):
        server.compute(number, events=())
    assert not server.cache.distrusts_events
    assert server.wait(DUE_S)
    assert server.cache.source == "distrusted"
    assert server.told == {key for n in range(LEAST_JUDGED) for key in keys(n)}
    server.compute(7, events=())
    assert not server.wait(DUE_S), "it is said once"


def test_events_of_another_server_or_block_size_are_distrusted() -> None:
    for strange in (stored(900), stored(1, block_tokens=8)):
        server = Server()
        for number in range(LEAST_JUDGED):
            server.compute(number, events=(strange,))
        server.wait(DUE_S)
        assert server.cache.distrusts_events
    assert server.cache.other_block_tokens == 8


def test_events_that_begin_to_come_are_trusted_again() -> None:
    server = Server()
    for number in range(LEAST_JUDGED):
        server.compute(number, events=())
    server.wait(DUE_S)
    for number in range(10, 10 + LEAST_JUDGED):
        server.compute(number)
    assert server.wait(0.1)
    assert server.cache.source == "events"
    assert server.told == {key for n in range(10, 10 + LEAST_JUDGED) for key in keys(n)}


def test_a_late_event_is_no_missing_one() -> None:
    server = Server()
    for number in range(LEAST_JUDGED):
        server.compute(number, events=())
    server.wait(DUE_S / 2)
    server.cache.hear(tuple(stored(n) for n in range(LEAST_JUDGED)), False, server.now)
    server.look()
    server.wait(DUE_S)
    assert not server.cache.distrusts_events


def test_prompts_that_no_event_names_do_not_count() -> None:
    """These prompts must be ignored: prompts of adapters, prompts computed elsewhere, and all
    prompts of a server without a prefix cache."""
    server = Server()
    for number in range(LEAST_JUDGED):
        server.cache.note_computed(keys(number), server.now, False)
    assert not server.wait(DUE_S)
    without = Server(caches=False)
    for number in range(LEAST_JUDGED):
        without.compute(number, events=())
    assert not without.wait(DUE_S)
    assert not without.told


STEPS = st.lists(
    st.tuples(st.sampled_from(["named", "silent", "strange", "wait", "lost"]), st.integers(0, 9)),
    max_size=40,
)


@given(STEPS)
def test_the_head_is_told_exactly_what_is_used(steps: list[tuple[str, int]]) -> None:
    """`Server.look` compares after each step."""
    server = Server()
    for what, number in steps:
        if what == "named":
            server.compute(number)
        elif what == "silent":
            server.compute(number, events=())
        elif what == "strange":
            server.compute(number, events=(stored(number + 50),))
        elif what == "lost":
            server.cache.hear((), True, server.now)
            server.look()
        else:
            server.wait(float(number))

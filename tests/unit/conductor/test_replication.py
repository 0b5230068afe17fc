"""Tests that the Conductor copies hot prefixes before a request needs them on another instance."""

from __future__ import annotations

from conductor_desk import Desk, sent

from moonpool.conductor.actions import Tick
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import BlocksSnapshot, PrefixTakenOver, TakeOverPrefix
from moonpool.types import BlockKey

SHARED = tuple(range(8000))


def shared_keys(desk: Desk) -> tuple[BlockKey, ...]:
    layout = next(iter(desk.conductor.instances.values())).info.layout
    return tuple(block_keys(SHARED, layout.block_tokens, root_key(layout.fingerprint, "")))


def with_holder(**config: object) -> tuple[Desk, tuple[BlockKey, ...]]:
    """Sets up p0 with a shared prefix, and empty p1 and p2."""
    desk = Desk("p0", "p1", "p2", "d0", num_blocks=100_000, **config)
    keys = shared_keys(desk)
    for name in ("p0", "p1", "p2", "d0"):
        held = keys if name == "p0" else ()
        desk.report(name, BlocksSnapshot(next_sequence=0, keys=held))
    return desk, keys


def copies(desk: Desk) -> list[tuple[str, TakeOverPrefix]]:
    return sent(desk.handle(Tick()), TakeOverPrefix)


def sessions(desk: Desk, number: int, new_tokens: int = 500) -> None:
    for each in range(number):
        private = tuple(range(10_000 * (each + 1), 10_000 * (each + 1) + new_tokens))
        desk.now += 0.5
        desk.ask(f"s{each}", token_ids=SHARED + private)


def test_a_prefix_with_much_work_is_copied_once_at_a_time() -> None:
    desk, keys = with_holder(replicate=True, placement="cache-aware", admission="none")
    sessions(desk, 12)
    ((taker, command),) = copies(desk)
    assert taker in ("p1", "p2") and command.keys == keys
    assert command.source.instance_id == "p0"
    assert not copies(desk), "the copy is under way"
    assert desk.conductor.replication is not None
    desk.report(taker, PrefixTakenOver(number=command.number, num_blocks=len(keys)))
    assert desk.conductor.replication.num_blocks == len(keys)


def test_a_prefix_with_little_work_is_not_copied() -> None:
    desk, _ = with_holder(replicate=True, placement="cache-aware", admission="none")
    sessions(desk, 3)
    assert not copies(desk), "too few sessions"
    for number in range(6):
        desk.now += 300.0
        desk.ask(f"later{number}", token_ids=(*SHARED, 90000 + number), deadline_s=desk.now + 60.0)
        assert not copies(desk), "the work is spread over a long time"


def test_nothing_is_copied_unless_it_is_switched_on() -> None:
    desk, _ = with_holder(placement="cache-aware", admission="none")
    sessions(desk, 12)
    assert not copies(desk)

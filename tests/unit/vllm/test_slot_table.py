"""Tests slots of a llama-server: which slot computes a request, and which slots are saved and
restored."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.types import BlockKey
from moonpool.vllm.slot_table import (
    LEAST_SAVED_TOKENS,
    Held,
    Prompt,
    SlotTable,
    held_by,
    name_of,
)

BLOCK = 16
LONG = tuple(range(LEAST_SAVED_TOKENS + BLOCK))


def prompt(tokens: Sequence[int], tenant: str = "", identity: bytes = b"model") -> Prompt:
    root = root_key(b"layout", tenant)
    return Prompt(tuple(tokens), root, tuple(block_keys(tokens, BLOCK, root)), identity)


def turned(tokens: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(token + 1000 * by for token in tokens)


def compute(table: SlotTable, asked: Prompt, answer: Sequence[int] = (7, 8)) -> int:
    """Runs one whole request. Returns its slot."""
    plan = table.begin(asked)
    assert plan is not None
    if plan.save is not None:
        saved(table, plan.save)
    table.end(plan.slot, held_by(asked, BLOCK, answer))
    return plan.slot


def saved(table: SlotTable, held: Held) -> tuple[str, ...]:
    return table.add_file(Held(held.root, held.keys, held.num_tokens, held.name))


def test_a_conversation_goes_on_in_its_slot() -> None:
    table = SlotTable(3, BLOCK)
    first = compute(table, prompt(LONG))
    compute(table, prompt(turned(LONG, 1)))
    plan = table.begin(prompt((*LONG, 7, 8, 9)))
    assert plan == (first, True, None, None, len(LONG) // BLOCK * BLOCK)


def test_empty_slots_are_taken_first_then_the_one_that_was_used_longest_ago() -> None:
    table = SlotTable(2, BLOCK)
    one = compute(table, prompt(LONG))
    other = compute(table, prompt(turned(LONG, 1)))
    assert one != other
    compute(table, prompt(LONG))  # again
    assert compute(table, prompt(turned(LONG, 2))) == other


def test_no_slot_is_given_twice() -> None:
    table = SlotTable(2, BLOCK)
    plans = [table.begin(prompt(turned(LONG, number))) for number in range(3)]
    assert [plan and plan.slot for plan in plans[:2]] == [0, 1]
    assert plans[2] is None


def test_what_leaves_its_slot_is_saved_and_comes_back() -> None:
    table = SlotTable(1, BLOCK, saves=True)
    compute(table, prompt(LONG))
    leaving = table.begin(prompt(turned(LONG, 1)))
    assert leaving is not None and leaving.save is not None and leaving.restore is None
    saved(table, leaving.save)
    table.end(0, held_by(prompt(turned(LONG, 1)), BLOCK, (3,)))
    back = table.begin(prompt((*LONG, 7, 8, 9)))
    assert back is not None and back.restore is not None
    assert back.restore.name == leaving.save.name and back.reuses
    assert back.save is not None and back.save.name != leaving.save.name


def test_short_prompts_and_unsaved_models_are_not_saved() -> None:
    table = SlotTable(1, BLOCK, saves=True)
    compute(table, prompt(LONG[: LEAST_SAVED_TOKENS - 2]))
    compute(table, prompt(turned(LONG, 1), identity=b""))
    assert table.unsaved() is None
    compute(table, prompt(turned(LONG, 2)))
    assert table.unsaved() is not None


def test_a_longer_file_makes_a_shorter_one_needless() -> None:
    table = SlotTable(1, BLOCK, saves=True)
    one, longer = held_by(prompt(LONG), BLOCK), held_by(prompt(range(600)), BLOCK)
    assert saved(table, one) == ()
    assert saved(table, longer) == (one.name,)
    assert list(table.files) == [longer.name]
    assert table.keys == longer.keys
    compute(table, prompt(LONG))
    assert table.unsaved() is None  # the slot with the longer prompt has it


def test_tenants_never_use_what_is_anothers() -> None:
    table = SlotTable(1, BLOCK, saves=True)
    compute(table, prompt(LONG, "one"))
    plan = table.begin(prompt(LONG, "other"))
    assert plan is not None and plan.save is not None and not plan.reuses
    saved(table, plan.save)
    table.end(plan.slot, held_by(prompt(LONG, "other"), BLOCK, (5,)))
    back = table.begin(prompt((*LONG, 7, 8), "other"))
    assert back is not None and back.restore is None and back.reuses


def test_tenants_without_end_are_not_remembered() -> None:
    table = SlotTable(2, BLOCK)
    for number in range(1000):  # a client may send another `cache_salt` with each call
        compute(table, prompt(LONG[:BLOCK], f"/{number}", b""))
        table.take_changes()
    assert not table.has_one_root
    assert len(pickle.dumps(table)) < 5000


def test_names_are_of_content_alone() -> None:
    root, other = root_key(b"layout", ""), root_key(b"layout", "tenant")
    names = {
        name_of(identity, of, tokens)
        for identity in (b"a", b"b")
        for of in (root, other)
        for tokens in ((1, 2), (1, 2, 3), (513,))
    }
    assert len(names) == 12
    assert name_of(b"a", root, [1, 2]) in names


def test_prompts_outside_the_cache_leave_nothing() -> None:
    table = SlotTable(1, BLOCK, saves=True)
    outside = Prompt(LONG, root_key(b"layout", ""), ())
    plan = table.begin(outside)
    assert plan is not None and not plan.reuses
    table.end(0, held_by(outside, BLOCK))
    assert not len(table) and table.unsaved() is None


steps = st.lists(
    st.tuples(
        st.sampled_from(("begin", "end", "idle", "drop", "forget")),
        st.integers(0, 5),  # the number of the conversation, or of the open request
        st.integers(1, 30),  # the length in blocks
        st.sampled_from(("", "one", "other")),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_any_order(done: list[tuple[str, int, int, str]]) -> None:
    table = SlotTable(3, BLOCK, saves=True)
    told: set[BlockKey] = set()
    # the content of each slot of the server
    inside: dict[int, Held | None] = dict.fromkeys(range(3))
    busy: dict[int, Prompt] = {}
    roots: set[BlockKey] = set()
    for what, number, blocks, tenant in done:
        if what == "begin":
            asked = prompt(turned(range(blocks * BLOCK), number), tenant)
            plan = table.begin(asked)
            assert (plan is None) == (len(busy) == 3)
            if plan is None:
                continue
            roots.add(asked.root)
            assert plan.slot not in busy
            busy[plan.slot] = asked
            if plan.save is not None:
                assert plan.save == inside[plan.slot]
                saved(table, plan.save)
            if plan.restore is not None:
                assert plan.restore.keys[0] == asked.keys[0]
                assert plan.restore.name in table.files or plan.save is not None
                table.put(plan.slot, plan.restore)
                inside[plan.slot] = plan.restore
            content = inside[plan.slot]
            if plan.reuses and len(roots) > 1:
                assert content is not None and content.root == asked.root
                assert content.keys[0] == asked.keys[0]
        elif what == "end" and busy:
            slot = sorted(busy)[number % len(busy)]
            asked = busy.pop(slot)
            inside[slot] = held_by(asked, BLOCK, (1, 2)) if blocks > 3 else None
            table.end(slot, inside[slot])
        elif what == "idle":
            found = table.unsaved()
            if found is not None:
                assert found[0] not in busy and found[1] == inside[found[0]]
                saved(table, found[1])
        elif what == "drop" and table.files:
            table.drop_file(sorted(table.files)[number % len(table.files)])
        elif what == "forget":
            table.forget_slots()
            inside |= {slot: None for slot in inside if slot not in busy}
        gained, lost = table.take_changes()
        assert not told & set(gained) and set(lost) <= told
        told = (told | set(gained)) - set(lost)
        held = [one for one in inside.values() if one is not None]
        expected = {key for one in (*held, *table.files.values()) for key in one.keys}
        assert told == set(table.keys) == expected

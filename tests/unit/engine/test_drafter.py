"""Tests a draft model's guesses, its memory, and the end of a step whose draft model fails."""

from __future__ import annotations

import msgspec

from moonpool.config.tables import SpeculativeConfig
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import DraftTask, RunStep, StepEntry
from moonpool.text.tokenizer import unlike
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.runner import choose_ops, make_layout
from moonpool_engine.worker.engine_boot import draft_blocks
from moonpool_engine.worker.engine_thread import Drafting

MODEL = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300"
GREEDY = SamplingParams(temperature=0.0)


def drafter(vocab_size: int = 300) -> Drafter:
    model = open_model(MODEL, "float32")
    return Drafter(model, choose_ops("float32"), 16, 16, vocab_size)


def entry(number: int, task: DraftTask | None) -> StepEntry:
    return StepEntry(AttemptId(str(number)), [7], 40, [BlockId(0)], GREEDY, draft_task=task)


def plain_guesses(token_ids: list[int], num_tokens: int) -> list[int]:
    """Returns the greedy answer of a fresh engine that computes each token in a separate step."""
    engine = drafter().engine
    for position, token_id in enumerate(token_ids):
        logits = engine.logits([_row(token_id, position)])
    found: list[int] = []
    while len(found) < num_tokens:
        found.append(int(logits[0].argmax()))
        logits = engine.logits([_row(found[-1], len(token_ids) + len(found) - 1)])
    return found


def _row(token_id: int, position: int) -> StepEntry:
    blocks = [BlockId(b) for b in range(8)]
    return StepEntry(AttemptId("plain"), [token_id], position, blocks, None)


def test_guesses_are_the_greedy_answer_over_several_tasks() -> None:
    one, other = [3, 1, 4, 1, 5, 9, 2, 6], [8, 9, 7, 9]
    expected, beside = plain_guesses(one, 6), plain_guesses(other, 3)
    made = drafter()
    tasks = [DraftTask(one, 0, [5, 2], 3), None, DraftTask(other, 0, [9], 3)]
    entries, drafted, seconds = made.run([entry(i, task) for i, task in enumerate(tasks)])
    assert drafted == {0: tuple(expected[:3]), 2: tuple(beside)}
    assert [list(each.new_token_ids) for each in entries] == [
        [7, *expected[:3]],
        [7],
        [7, *beside],
    ]
    assert [each.num_drafts for each in entries] == [3, 0, 3] and seconds > 0
    assert not any(each.draft_task for each in entries)
    # All guesses were right, so the draft model has not yet computed the last guess and the token
    # after it.
    again = DraftTask(expected[2:4], len(one) + 2, [5, 2], 2)
    _, drafted, _ = made.run([entry(0, again)])
    assert drafted == {0: tuple(expected[4:6])}


def test_no_guess_may_end_the_answer() -> None:
    expected = plain_guesses([3, 1, 4], 3)
    ends = frozenset({expected[1]})
    _, drafted, _ = drafter().run([entry(0, DraftTask([3, 1, 4], 0, [1], 3, ends))])
    assert drafted == {0: tuple(expected[: expected.index(expected[1])])}


def test_vocabularies_may_be_padded_differently() -> None:
    made = drafter(vocab_size=60)
    _, drafted, _ = made.run([entry(0, DraftTask([3, 1, 4], 0, [1], 4))])
    assert len(drafted[0]) == 4 and max(drafted[0]) < 60
    _, drafted, _ = made.run([entry(0, DraftTask([3, 350, 4], 0, [1], 4))])
    assert drafted == {0: ()}


def test_an_error_ends_drafting_and_no_step() -> None:
    drafting = Drafting(drafter())
    # block 99 does not exist
    step = RunStep((entry(0, DraftTask([3], 0, [99], 3)), entry(1, None)))
    for _ in range(2):
        changed, drafted, seconds = drafting.run(step)
        assert not drafted and not seconds
        assert [list(each.new_token_ids) for each in changed.entries] == [[7], [7]]
        assert not any(each.draft_task or each.num_drafts for each in changed.entries)


def test_its_memory_is_bounded_by_the_pool() -> None:
    model: LoadedModel = open_model(MODEL, "float32")
    layout = make_layout(model, 16)
    larger = msgspec.structs.replace(layout, num_layers=64)
    settings = SpeculativeConfig(method="draft_model", model="small")
    # gets at most as many tokens as the pool
    assert draft_blocks(settings, layout, larger, 1000) == 1000
    assert draft_blocks(settings, layout, layout, 1000) == 125  # gets an eighth of the bytes
    chosen = msgspec.structs.replace(settings, draft_kv_tokens=100)
    assert draft_blocks(chosen, layout, layout, 1000) == 7


def test_what_makes_vocabularies_differ() -> None:
    class Other(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"!" if token_id == 65 else super().token_bytes(token_id)

    assert unlike(ByteTokenizer(300), ByteTokenizer(300)) == ""
    assert unlike(ByteTokenizer(300), ByteTokenizer(301)) == "301 tokens, not 300"
    assert unlike(ByteTokenizer(300), Other(300)) == "token 65 is b'!', not b'A'"

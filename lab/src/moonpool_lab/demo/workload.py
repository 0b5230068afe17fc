"""The demo's workload: conversations over one long shared text, whose right answers are known.

The built-in model recalls earlier text byte for byte, so each question has one right answer. The
answer stands in the prefix that all conversations share, or in an earlier turn of the same
conversation (in blocks that decode made). A wrong, stale or misplaced block gives a wrong answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# No five bytes occur twice, because the model could not know otherwise where to continue.
TALE = (
    "At dusk the pool lay still while old Bram counted lamps along his quay: some for ships come"
    " home, one to guide a vessel not yet back. He set this last light apart. When high tide"
    " turned, bells rang far out on dark water, twice, then again; Captain Ida stepped ashore,"
    " laughed aloud, and hung her lantern beside its seven sisters. "
)
LETTER_TOKENS = 700
_SYLLABLES = (
    "al",
    "be",
    "cor",
    "da",
    "el",
    "fi",
    "gan",
    "hu",
    "is",
    "jo",
    "ka",
    "lu",
    "mar",
    "no",
    "or",
    "pe",
    "qui",
    "ra",
    "sel",
    "ti",
    "ul",
    "va",
    "wen",
    "xa",
    "yor",
    "zel",
)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """The user's text and the right answer of the model. `stop` ends the answer."""

    question: str
    expected: str
    stop: str | None
    what: str


@dataclass(slots=True)
class Conversation:
    """The turns of one user. `text` grows with each question and answer."""

    user: str
    text: str
    turns: list[ConversationTurn] = field(default_factory=list)
    num_asked: int = 0
    book: dict[str, str] = field(default_factory=dict)  # names and codes in the shared text

    def skip(self, num_turns: int) -> None:
        """Continues as if the first turns had been asked and answered correctly."""
        for turn in self.turns[:num_turns]:
            self.note(turn, turn.expected)

    def note(self, turn: ConversationTurn, answer: str) -> None:
        """Adds a question and its answer to the text."""
        self.num_asked += 1
        self.text += turn.question + answer + (turn.stop or "") + "\n"


def make_conversations(
    num_users: int, num_turns: int, num_berths: int, seed: int
) -> list[Conversation]:
    """Returns conversations that share one harbour book of `num_berths` entries (about 20 tokens
    each)."""
    rng = random.Random(seed)
    berths = {f"berth-{i:03d}": _name(rng) for i in range(num_berths)}
    book = "The harbour book. " + TALE + "".join(f"[{k}={v}] " for k, v in berths.items())
    conversations = []
    for i in range(num_users):
        talk = Conversation(
            user=f"user {i + 1}", text=book + f"\nUser {i + 1} comes in.\n", book=berths
        )
        crates: dict[str, str] = {}
        for turn in range(num_turns):
            talk.turns.append(_make_turn(rng, turn, i, berths, crates))
        conversations.append(talk)
    return conversations


def _make_turn(
    rng: random.Random, turn: int, user: int, berths: dict[str, str], crates: dict[str, str]
) -> ConversationTurn:
    if turn == 0 and user == 0:
        begin, rest = TALE[:21], TALE[21:].rstrip()
        return ConversationTurn(f"Tell the tale: {begin}", rest, None, "the tale, go on")
    letter = ""
    if turn == 1 and user == 0:
        # The prompt is too long to be computed beside decodes. So the prompt goes to a prefill
        # instance, which must fetch the blocks of the tale from the instance that decoded the tale.
        letter = f"A letter: {filler(random.Random(user), LETTER_TOKENS)}. "
    crate, content = f"crate-{user}{turn:02d}", _name(rng)
    note = f"Note that [{crate}={content}]. "
    if turn % 2 and crates:
        key = rng.choice(sorted(crates))
        expected, what = crates[key], f"{key} (earlier turn)"
    else:
        key = rng.choice(sorted(berths))
        expected, what = berths[key], f"{key} (shared book)"
    crates[crate] = content
    return ConversationTurn(f"{letter}{note}Look up [{key}=", expected, "]", what)


def look_up(talk: Conversation, key: str) -> ConversationTurn:
    """Returns a turn that asks for an entry of the shared text."""
    return ConversationTurn(f"Look up [{key}=", talk.book[key], "]", f"{key} (shared book)")


def filler(rng: random.Random, num_characters: int) -> str:
    """Returns words without meaning. The built-in model has one token per character."""
    words = []
    while num_characters > 0:
        words.append(_name(rng))
        num_characters -= len(words[-1]) + 1
    return " ".join(words)


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(4)).capitalize()

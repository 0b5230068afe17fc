"""Makes the conversations of a trial: prompts that share prefixes, each with codes planted in it.

A code is two groups of six characters, drawn for this trial. No model makes up a code. So if an
answer has a group that its prompt lacks, the group comes from another conversation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import msgspec

from moonpool_lab.replay.prompts import WORDS

GROUP_CHARS = 6
ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
TRUNK_WORDS = (20, 120, 500)
"""Lengths of the text that the forks of a family share: short, middle and long prompts."""
PLACES = (
    *("harbour", "garden", "museum", "tower", "market", "bridge", "castle", "station"),
    *("library", "theatre", "factory", "airport", "chapel", "stadium", "school", "mill"),
)
_GROUPS = re.compile(rf"(?=([A-Z0-9]{{{GROUP_CHARS}}}))")


class Question(msgspec.Struct, frozen=True):
    """One request. `fact` is the code that the question asks for; `foreign_to` finds codes of other
    questions."""

    name: str
    api: str
    messages: tuple[tuple[str, str], ...]
    """(role, text), in order; a completion's prompt is the joined texts."""
    fact: str
    max_tokens: int

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.messages)

    def body(self, model: str, streamed: bool, logprobs: int) -> bytes:
        """Returns the greedy request as JSON; `logprobs` is the number of alternatives, or 0."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in self.messages]
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": logprobs}
        else:
            body["prompt"] = self.text
            if logprobs:
                body["logprobs"] = logprobs
        return msgspec.json.encode(body)


def groups_of(text: str) -> set[str]:
    """Returns every run of six capitals and digits in a text, including overlapping runs."""
    return set(_GROUPS.findall(text))


class ConversationMaker:
    """Draws conversations from a seed, and knows all groups that it has planted."""

    def __init__(self, seed: int, apis: tuple[str, ...], max_tokens: int, max_words: int) -> None:
        """Prompts stay below about `max_words` words."""
        assert apis
        self._rng = random.Random(f"trial {seed}")
        self._apis = apis
        self._max_tokens = max_tokens
        self._max_words = max_words
        self._num_fillers = 0
        self.planted: set[str] = set()

    def questions(self, num_families: int) -> list[Question]:
        """Returns the questions of families of forked conversations, each with two turns."""
        return [q for number in range(num_families) for q in self._family(number)]

    def session(
        self, name: str, shared: str, opening_words: int, turn_words: int, turns: int
    ) -> list[Question]:
        """Returns the turns of one long conversation, of `len(PLACES)` at most.

        Each turn plants a code, and asks for the code of any turn so far. The history contains the
        right answers, so prompts do not depend on the server's answers. `shared` is the text with
        which all prompts begin.
        """
        told: tuple[tuple[str, str], ...] = (("system", shared),) if shared else ()
        known: list[tuple[str, str]] = []
        found = []
        for turn, place in enumerate(self._rng.sample(PLACES, turns)):
            known.append((place, self._code()))
            words = self._words(turn_words if turn else opening_words)
            text = f"{words}. {_planted(*known[-1])}"
            question = self._question(
                f"{name}-turn-{turn + 1}",
                (*told, ("user", text)),
                *self._rng.choice(known),
                self._max_tokens,
            )
            found.append(question)
            told = (*question.messages, ("assistant", f"{question.fact}."))
        return found

    def words(self, count: int) -> str:
        """Returns a text that several sessions may share."""
        return f"{self._words(count)}."

    def filler(self, num_words: int) -> Question:
        """Returns a request with a prefix of its own, which fills the cache."""
        self._num_fillers += 1
        place, code = self._rng.choice(PLACES), self._code()
        note = f"{self._words(min(num_words, self._max_words))}. {_planted(place, code)}"
        return self._question(f"filler-{self._num_fillers}", (("user", note),), place, code, 8)

    def foreign_to(self, question: Question, answer: str) -> set[str]:
        """Returns the groups in an answer that were planted, but not in its own prompt."""
        found = groups_of(answer) & self.planted
        return found - groups_of(question.text) if found else found

    def _family(self, number: int) -> Iterator[Question]:
        place, code = PLACES[number % len(PLACES)], self._code()
        length = min(TRUNK_WORDS[number % len(TRUNK_WORDS)], self._max_words)
        trunk = f"{self._words(length // 2)}. {_planted(place, code)} {self._words(length // 2)}."
        places = self._rng.sample([p for p in PLACES if p != place], 3)
        for fork, own in enumerate(places):
            own_code = self._code()
            first = (("system", trunk), ("user", f"{_planted(own, own_code)}"))
            name = f"family-{number}-fork-{fork}"
            yield self._question(f"{name}-turn-1", first, own, own_code, self._max_tokens)
            second = (*first, ("assistant", f"It is {own_code}."), ("user", self._words(8)))
            yield self._question(f"{name}-turn-2", second, place, code, self._max_tokens)

    def _question(
        self,
        name: str,
        messages: tuple[tuple[str, str], ...],
        place: str,
        code: str,
        max_tokens: int,
    ) -> Question:
        """The last message ends in the middle of a sentence, so that models without instruction
        tuning name the code too."""
        role, text = messages[-1]
        ask = f"{text}\nRepeat the access code. The access code of the {place} is"
        api = self._rng.choice(self._apis)
        return Question(name, api, (*messages[:-1], (role, ask)), code, max_tokens)

    def _code(self) -> str:
        groups = ["".join(self._rng.choices(ALPHABET, k=GROUP_CHARS)) for _ in range(2)]
        self.planted.update(groups)
        return "-".join(groups)

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))


def _planted(place: str, code: str) -> str:
    return f"The access code of the {place} is {code}."

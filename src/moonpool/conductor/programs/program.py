"""What the Conductor knows of one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.types import BlockKey, InstanceId

MAX_AT_ONCE = 16
"""Calls of one program, sub-agents not counted, that are not refused for the load."""


@dataclass(slots=True, eq=False)
class Program:
    """An agent program: a series of calls with tools between them. A sub-agent is a program with a
    parent; the first of them all, the root, stands for all of them where whole programs wait or are
    served in order."""

    program_id: str
    tenant: str
    line: int  # place of the program's root in the order of waiting requests
    number: int  # number in the order of arrival
    parent: Program | None = None
    kind: str = ""
    blocks_parent: bool = True
    is_named: bool = True  # False for a program that was recognised by its prefix
    has_begun: bool = False  # whether a call of the program, or of its root, was placed
    num_running: int = 0
    num_calls: int = 0
    context_tokens: int = 0  # tokens of prompt and answer of the program's last call
    # prompt tokens of its first call that other programs had computed before
    shared_tokens: int = 0
    keys: Sequence[BlockKey] = ()  # block keys of the program's last prompt
    instance: InstanceId | None = None  # the instance where the program's last call decodes
    keep_until_s: float = 0.0  # the time until which its client asks to keep its blocks
    # Its pause.
    since_s: float | None = None
    pause_s: float | None = None  # length of the program's last pause
    pause_class: tuple[int, int] = (0, -1)
    num_ranges: int = 0  # number of age ranges that the program's pause has passed
    chance: float = 1.0  # chance that the program's next call comes soon, at the last check
    parked: bool = False  # whether the program's blocks are to be evicted first
    children: list[Program] = field(default_factory=list)

    @property
    def root(self) -> Program:
        """Returns the root program, which is the program itself if no other program has started
        it."""
        program = self
        while program.parent is not None:
            program = program.parent
        return program

    @property
    def goes_on(self) -> bool:
        """Whether the program's calls wait where new requests would be refused. Many parallel calls
        do not come from one agent, but from clients that share one name."""
        return self.root.has_begun and self.num_running <= MAX_AT_ONCE

    @property
    def own_tokens(self) -> int:
        """KVCache tokens that only this program needs."""
        return max(self.context_tokens - self.shared_tokens, 0)

    @property
    def awaits_children(self) -> bool:
        """Whether the program continues only when sub-agents that it waits for have ended."""
        return any(
            child.blocks_parent and (child.num_running or child.since_s is not None)
            for child in self.children
        )

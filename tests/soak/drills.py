"""Flips single bits at places for which it is known which check must find them.

The places are memory that a peer reads, memory that is written to the SSD, the SSD, and the wire.
Nothing else runs between drills.
"""

from __future__ import annotations

import time

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import PrefixSource
from moonpool.types import BlockKey
from tests.soak import orders
from tests.soak.cluster import Cluster, Member, SoakError
from tests.soak.content import LAYOUT
from tests.soak.traffic import Attempt, Traffic

PROMPT_BLOCKS = 6
FILLER_BLOCKS = 8
SETTLE_S = 0.02
MAX_FILLERS = 150
_TAIL_TOKENS = 5


class Drills:
    def __init__(self, cluster: Cluster, traffic: Traffic) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._rng = traffic.rng
        self.seen = cluster.seen

    def run(self) -> None:
        """Runs the drills that are possible at this moment."""
        self.memory_read_by_a_peer()
        self.memory_written_to_the_disk()
        self.disk()
        self.wire()

    def memory_read_by_a_peer(self) -> None:
        source, reader = self._new_prompt_at_two()
        if source is None:
            return
        member, prompt, keys = source
        third = self._other(member, reader)
        flipped = self._flip_memory(member, keys)
        if flipped is None:
            return
        attempt = self._fetch(third, member, prompt, len(keys))
        self._demand_found(attempt, "memory flips found by a peer")
        self._cluster.wait(
            lambda: flipped not in member.in_dram,
            60.0,
            f"{member.name} to forget the flipped block",
        )

    def memory_written_to_the_disk(self) -> None:
        """Flips a bit of a block that is written with its original checksum, so its next load must
        fail."""
        source, _ = self._new_prompt_at_two()
        if source is None:
            return
        member, prompt, keys = source
        flipped = self._flip_memory(member, keys)
        if flipped is None:
            return
        for _ in range(MAX_FILLERS):
            filler = self._traffic.draw_tokens(FILLER_BLOCKS * LAYOUT.block_tokens)
            self._compute(member, filler)
            if flipped not in member.in_dram:
                break
        self._cluster.wait(lambda: self._settled(member), 60.0, "demotion to settle")
        end = keys.index(flipped) + 1
        if member.reach(keys) < end or flipped not in member.on_ssd:
            self.seen["memory flips evicted unread"] += 1
            member.tainted.add(flipped)
            return
        prompt = prompt[: end * LAYOUT.block_tokens + 1]
        self._demand_found(self._compute(member, prompt), "memory flips found after the disk")

    def disk(self) -> None:
        for member in self._cluster.up:
            found = self._demoted_prompt(member)
            if found is None:
                continue
            key, prompt, tenant = found
            if self.flip_disk(member, key):
                before = self.seen["disk flips found"]
                attempt = self._compute(member, list(prompt), tenant)
                self._demand_found(attempt, "")
                self._cluster.wait(
                    lambda n=before: self.seen["disk flips found"] > n,  # type: ignore[misc]
                    60.0,
                    "the flip on the disk to be found",
                )

    def wire(self) -> None:
        member = self._rng.choice(self._cluster.up)
        prompt, keys = self._prompt()
        self._compute(member, prompt)
        reader = self._other(member)
        relay = member.relay
        flips = relay.flips
        relay.flip_next()
        attempt = self._fetch(reader, member, prompt, len(keys), relayed=True)
        if relay.flips == flips:
            raise SoakError("the relay flipped nothing: the blocks went another way")
        assert attempt.started is not None
        if not attempt.started.corrupt_slices and attempt.started.fetched_tokens == len(keys) * 16:
            raise SoakError("a bit that flipped on the wire was not found")
        self.seen["wire flips found"] += 1

    def flip_disk(self, member: Member, key: BlockKey) -> bool:
        """Flips a bit of any block on an SSD; its next reader must find it."""
        answer = self._cluster.ask(member, orders.FlipDisk(key=key))
        assert isinstance(answer, orders.Flipped)
        if answer.done:
            member.flipped[answer.slot] = key
            member.doubtful.discard(answer.slot)
            self.seen["disk flips"] += 1
        return answer.done

    def _demand_found(self, attempt: Attempt, what: str) -> None:
        if attempt.outcome != "done":
            raise SoakError(f"a drill's work ended as {attempt.outcome}")
        if attempt.started is None or not attempt.started.corrupt_slices:
            raise SoakError(f"a flipped bit was read by {attempt.work.attempt_id} and not found")
        if what:
            self.seen[what] += 1

    def _new_prompt_at_two(
        self,
    ) -> tuple[tuple[Member, list[int], list[BlockKey]] | None, Member]:
        """Makes a prompt that one instance computes and another reads, so that the checksums of its
        blocks are known."""
        member = self._rng.choice(self._cluster.up)
        reader = self._other(member)
        prompt, keys = self._prompt()
        self._compute(member, prompt)
        self._fetch(reader, member, prompt, len(keys))
        whole = member.reach(keys) == len(keys) and not set(keys) & member.on_ssd
        return ((member, prompt, keys) if whole else None), reader

    def _flip_memory(self, member: Member, keys: list[BlockKey]) -> BlockKey | None:
        end_s = time.monotonic() + 10.0
        while time.monotonic() < end_s:  # repeats until the block's last reader has released it
            for key in self._rng.sample(keys, len(keys)):
                answer = self._cluster.ask(member, orders.FlipMemory(key=key))
                assert isinstance(answer, orders.Flipped)
                if answer.done:
                    self.seen["memory flips"] += 1
                    return key
            self._cluster.pump(SETTLE_S)
        return None

    def _demoted_prompt(self, member: Member) -> tuple[BlockKey, tuple[int, ...], str] | None:
        """Finds a prompt whose blocks are in DRAM up to a block that is on the SSD only."""
        candidates = sorted(member.on_ssd)
        for key in self._rng.sample(candidates, min(40, len(candidates))):
            if key not in self._traffic.prompts or key in member.flipped.values():
                continue
            tokens, tenant = self._traffic.prompts[key]
            keys = block_keys(tokens, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, tenant))
            end = keys.index(key) + 1
            clean = not set(member.flipped.values()) & set(keys[:end])
            if clean and member.reach(keys[:end]) == end:
                prompt = tokens[: end * LAYOUT.block_tokens]
                return key, (*prompt, *self._traffic.draw_tokens(_TAIL_TOKENS)), tenant
        return None

    def _prompt(self) -> tuple[list[int], list[BlockKey]]:
        tokens = self._traffic.draw_tokens(PROMPT_BLOCKS * LAYOUT.block_tokens + _TAIL_TOKENS)
        return tokens, block_keys(tokens, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, ""))

    def _compute(self, member: Member, prompt: list[int], tenant: str = "") -> Attempt:
        return self._traffic.run(self._traffic.begin(prompt, tenant, member, member, None, 1))

    def _fetch(
        self,
        reader: Member,
        source: Member,
        prompt: list[int],
        num_blocks: int,
        relayed: bool | None = None,
    ) -> Attempt:
        relayed = self._rng.random() < 0.5 if relayed is None else relayed
        fetch = PrefixSource(source=source.way(relayed), num_blocks=num_blocks)
        return self._traffic.run(self._traffic.begin(prompt, "", reader, reader, fetch, 1))

    def _other(self, *members: Member) -> Member:
        return self._rng.choice([m for m in self._cluster.up if m not in members])

    def _settled(self, member: Member) -> bool:
        answer = self._cluster.ask(member, orders.Check())
        assert isinstance(answer, orders.Checked)
        return not answer.load.owners

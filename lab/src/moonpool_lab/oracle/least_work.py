"""Computes what each request needs at least to be effective, as work within an interval of time.

Prefill: the tokens behind the blocks that other prompts share are the request's own work, within
the TTFT SLO after its arrival. Shared blocks are nodes of a tree: an instance has to compute them
once after the first request with them arrives, and before the last effective request needs them.
That is the reuse of an infinite cache that all instances share without cost. The cost of a
prompt differs from the sum of its tokens' costs (`CostFloor`); this difference is that of a prompt
whose shared blocks are all cached. A node adds the smallest further difference among those of its
prompts that compute the node itself.

Pool prefill: the work that no decode instance may compute. The inline rule lets a decode instance
compute a prompt of which at most `inline_tokens` are not cached. A request with a longer tail of
its own is never computed inline. Nor is the first request that computes a node, if each prompt with
the node continues for longer than that after the node's start. That request computes the whole
node.

Decode: all tokens after the first. Three kinds of work bound the requests, each in seconds of an
instance. With (e, f) a line below the step time (`CostFloor.support`), a step of B decodes takes d
>= e + W, where W is the sum of f + g context over its decodes:

* pace: The SLO holds for the mean of an answer's longest tenth of gaps, so also for any weighted
  mean of its gaps with no weight above ten times the mean weight. The weights f + g context keep
  this limit, because they grow by a constant, so none is above twice the mean. A gap is at least
  its step's d. So the sum of w d over a request's steps is at most that of w T. Add it, times k = e
  / (T - e)^2, to the instance's time: d (1 + k W) - k W T >= T / (T - e) W for each step, with
  equality at d = T. So a decode takes at least T / (T - e) (f + g context). (Steps that are
  reported together count as steps of their mean.)
* memory: the prompts of a step's decodes fit into the engine's M tokens, or it is one request. So e
  is at least e times their sum over M, and a decode takes e prompt / M + f + g context.
* seats: a step has at most S decodes, so a decode takes at least e / S + f + g context.

One assumption is made: no attempt fails half-way or is preempted, so that only the work above
produces tokens. Such attempts only add work, unless they hand part of it to another instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.sim.workload import Arrival
from moonpool.types import BlockKey, Slo
from moonpool_lab.oracle.floors import CostFloor, Floats

Ints = npt.NDArray[np.int64]
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Rates:
    """The most that an instance can do, by kind of work, and the SLO of requests."""

    prefill: CostFloor
    decode: CostFloor  # cost floor of instances that decode
    slo: Slo
    engine_tokens: int  # KVCache tokens in an engine's memory
    block_tokens: int
    caches: bool  # whether prefixes are reused
    inline_tokens: int  # most tokens of a prompt that a decode instance computes
    step_tokens: int  # most tokens of a step; a longer prompt begins alone


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Arrays by request, and by node of the tree of shared blocks. Times and work in seconds.

    `possible`: whether the request could be effective on an idle cluster. `leaf`: the deepest
    shared node of each prompt. `decode_s`: seconds by kind of work, then by request. `beside_s`:
    the seconds that decodes add to steps which also compute prompts.
    """

    arrived_s: Floats
    prefill_until_s: Floats
    decode_until_s: Floats
    prefill_s: Floats
    pool_prefill_s: Floats
    decode_s: Floats
    beside_s: Floats
    possible: npt.NDArray[np.bool_]
    leaf: Ints
    parent: Ints
    node_s: Floats
    pool_node_s: Floats
    node_from_s: Floats
    node_until_s: Floats

    def __len__(self) -> int:
        return len(self.arrived_s)


def least_work_of(arrivals: Sequence[Arrival], rates: Rates) -> LeastWork:
    """Returns the least work of these requests."""
    arrived_s = np.array([arrival.arrived_s for arrival in arrivals])
    prompts = np.array([float(arrival.input_tokens) for arrival in arrivals])
    decodes = np.array([arrival.output_tokens - 1.0 for arrival in arrivals])
    until_s = arrived_s + rates.slo.ttft_s
    tree = _Tree(rates.prefill, rates.block_tokens)
    shared = np.zeros(len(arrivals))
    leaf = np.full(len(arrivals), NO_NODE)
    if rates.caches:
        tree.count(arrivals)
        for number, arrival in enumerate(arrivals):
            leaf[number], shared[number] = tree.add(arrival, until_s.item(number))
    floor = rates.prefill
    own_s = floor.prefill_s(shared, prompts)
    own_s += np.where(prompts - shared > rates.step_tokens, floor.prompt_s, 0.0)
    pairs = zip(prompts.tolist(), shared.tolist(), strict=True)
    own_s += [floor.departure(int(prompt), int(cached)) for prompt, cached in pairs]
    pool_s = np.where(prompts - shared > rates.inline_tokens, own_s, 0.0)
    decode_s, possible = _decode_work(prompts, decodes, rates)
    beside_s = rates.decode.beside_sequence_s * decodes + rates.decode.context_s * _contexts(
        prompts, decodes
    )
    return LeastWork(
        arrived_s=arrived_s,
        prefill_until_s=until_s,
        decode_until_s=until_s + decodes * rates.slo.tbt_s,
        prefill_s=own_s,
        pool_prefill_s=pool_s,
        decode_s=decode_s,
        beside_s=beside_s,
        possible=possible & (own_s <= rates.slo.ttft_s),
        leaf=leaf,
        parent=np.array(tree.parent, dtype=np.int64),
        node_s=tree.total_s(),
        pool_node_s=np.where(tree.left_tokens() > rates.inline_tokens, tree.total_s(), 0.0),
        node_from_s=np.array(tree.from_s),
        node_until_s=np.array(tree.until_s),
    )


def _contexts(prompts: Floats, decodes: Floats) -> Floats:
    """Returns the sum of the contexts of an answer's decodes. The first context is the prompt and
    one token."""
    return np.asarray(decodes * prompts + 0.5 * decodes * (decodes + 1.0))


def _decode_work(
    prompts: Floats, decodes: Floats, rates: Rates
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Returns the work by kind and request, and whether the SLO can be kept at all."""
    floor, tbt_s = rates.decode, rates.slo.tbt_s / rates.decode.num_stages
    contexts = _contexts(prompts, decodes)
    context_s = floor.context_s
    mean_context = float(contexts.sum() / max(decodes.sum(), 1.0))
    memory = max(float(rates.engine_tokens or np.inf), float((prompts + decodes).max(initial=1.0)))
    seats = len(floor.alone_s)

    def step_s(batch: int) -> float:
        return float(floor.alone_s[batch - 1]) + context_s * batch * mean_context

    fitting = sum(step_s(batch) <= tbt_s for batch in range(1, seats + 1))
    rows = []
    e, f = floor.support(fitting)
    pace = tbt_s / (tbt_s - e) if e < tbt_s else 1.0  # otherwise no answer keeps the SLO
    rows.append(pace * (f * decodes + context_s * contexts))
    e, f = floor.support(min(memory / max(mean_context, 1.0), seats))
    rows.append(e / memory * prompts * decodes + f * decodes + context_s * contexts)
    e, f = floor.support(seats)
    rows.append((e / seats + f) * decodes + context_s * contexts)
    tenth = np.maximum(1.0, np.floor(decodes / 10.0))
    longest = prompts + decodes - 0.5 * (tenth - 1.0)
    alone_s = float(floor.alone_s[0]) + context_s * longest
    return np.stack(rows), (decodes == 0) | (alone_s <= tbt_s)


class _Tree:
    """Blocks that several prompts share. Consecutive blocks of the same prompts are one node."""

    def __init__(self, floor: CostFloor, block_tokens: int) -> None:
        self.parent: list[int] = []
        self.from_s: list[float] = []
        self.until_s: list[float] = []
        self.work_s: list[float] = []
        self._departure_s: list[float] = []
        self._start: list[int] = []  # number of tokens before each node
        self._shortest: list[int] = []  # tokens of the shortest prompt with each node
        self._floor = floor
        self._block_tokens = block_tokens
        self._users: dict[BlockKey, int] = {}
        self._node: dict[BlockKey, int] = {}

    def count(self, arrivals: Sequence[Arrival]) -> None:
        """Counts the prompts with each block. In a damaged trace, a block may follow two different
        blocks. Such a block counts as no request's work."""
        users, before = self._users, dict[BlockKey, BlockKey]()
        odd: set[BlockKey] = set()
        for arrival in arrivals:
            last = BlockKey(b"")
            for key in arrival.keys:
                users[key] = users.get(key, 0) + 1
                if before.setdefault(key, last) != last:
                    odd.add(key)
                last = key
        for key in odd:
            users[key] = 0

    def add(self, arrival: Arrival, until_s: float) -> tuple[int, float]:
        """Adds a prompt; returns its deepest shared node and the end of its shared blocks."""
        node, num_before, start = NO_NODE, -1, 0
        ends: dict[int, int] = {}  # tokens up to the end of each node on the path of a prompt
        for key in arrival.keys:
            number = self._users[key]
            if number == 1:
                break
            known = self._node.get(key)
            if number and known is None:
                if number != num_before:
                    node = self._new(node, arrival.arrived_s, start)
                self._node[key] = node
                end = float(start + self._block_tokens)
                self.work_s[node] += self._floor.prefill_s(float(start), end)
            elif known is not None:
                node = known
            start += self._block_tokens
            if number:
                ends[node] = start
            num_before = number
        self._note_user(arrival.input_tokens, until_s, ends)
        return node, float(start)

    def _note_user(self, num_tokens: int, until_s: float, ends: dict[int, int]) -> None:
        departure = self._floor.departure
        for node, end in ends.items():
            self.until_s[node] = max(self.until_s[node], until_s)
            self._shortest[node] = min(self._shortest[node], num_tokens)
            more_s = departure(num_tokens, self._start[node]) - departure(num_tokens, end)
            self._departure_s[node] = min(self._departure_s[node], more_s)

    def total_s(self) -> Floats:
        """Returns the least time to compute each node."""
        return np.asarray(np.add(self.work_s, self._departure_s), dtype=float)

    def left_tokens(self) -> Floats:
        """Tokens from each node's beginning to the end of the shortest prompt with it."""
        return np.asarray(np.subtract(self._shortest, self._start), dtype=float)

    def _new(self, parent: int, from_s: float, start: int) -> int:
        self.parent.append(parent)
        self.from_s.append(from_s)
        self.until_s.append(0.0)
        self.work_s.append(0.0)
        self._departure_s.append(0.0)
        self._start.append(start)
        self._shortest.append(1 << 62)
        return len(self.parent) - 1

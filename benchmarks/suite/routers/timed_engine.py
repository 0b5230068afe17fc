"""A model of the time of one vLLM: its queue, chunked prefill, batch and prefix cache.

The engine computes nothing. Each step gives every answer one token and fills what is left of its
token budget with chunks of prompts, first come first served. The time of a step follows from its
prompt tokens, its answers and their contexts. Only the part of a prompt that is not cached is
computed. The cache evicts the least recently used blocks. If there is no room for the next token,
the newest request is preempted and starts again later, as in vLLM. The driver of the engine tells
the time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.types import Struct


class EngineSpeed(Struct, frozen=True):
    """Seconds of a step, and what each prompt token, answer, and token of context adds to it.
    `factor`: how slow the machine is; 2 is twice as slow."""

    step_s: float = 8e-3
    prompt_token_s: float = 6e-5
    answer_s: float = 6e-4
    context_token_s: float = 4e-7
    factor: float = 1.0


class EngineSize(Struct, frozen=True):
    """`step_tokens`: most tokens of one step. `kv_tokens`: tokens of KVCache, a multiple of
    blocks."""

    block_tokens: int = 16
    kv_tokens: int = 32_768
    step_tokens: int = 512
    max_sequences: int = 64
    max_model_tokens: int = 16_384

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


@dataclass(slots=True, eq=False)
class TimedRequest:
    """`computed`: tokens whose KVCache is computed. `tokens`: prompt and answer so far."""

    name: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    salt: bytes = b""
    computed: int = 0
    cached: int = 0  # of the prompt, when it was first taken
    is_new: bool = True
    blocks: list[bytes] = field(default_factory=list)  # full ones that it holds, in order
    num_held: int = 0  # blocks, with the last one that is not full


@dataclass(frozen=True, slots=True)
class TimedToken:
    """One token of an answer. `cached`: tokens of the prompt that were found."""

    name: str
    token: int
    cached: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class BlockNews:
    """A block that is stored (`token_ids` are its own), or forgotten (None)."""

    key: bytes
    parent: bytes | None = None
    token_ids: tuple[int, ...] | None = None


class TimedEngine:
    def __init__(self, size: EngineSize, speed: EngineSpeed) -> None:
        self.size, self._speed = size, speed
        self.waiting: deque[TimedRequest] = deque()
        self.running: list[TimedRequest] = []
        self.queries = self.hits = self.preemptions = 0
        self.news: list[BlockNews] = []
        self.users: dict[bytes, int] = {}
        # cached blocks; the block of the oldest use comes first
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        self.num_free = size.num_blocks  # blocks that are neither held nor cached
        self._plan: list[tuple[TimedRequest, int]] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold; cached blocks that no request holds count as
        free."""
        return 1.0 - (self.num_free + len(self._unused)) / self.size.num_blocks

    def submit(self, request: TimedRequest) -> None:
        """Raises ValueError for a request that can never be served."""
        longest = len(request.tokens) + request.max_tokens
        if longest > min(self.size.max_model_tokens, self.size.kv_tokens):
            raise ValueError(f"{longest} tokens are more than the model's context")
        self.waiting.append(request)

    def cancel(self, name: str) -> None:
        self.waiting = deque(one for one in self.waiting if one.name != name)
        for request in [one for one in self.running if one.name == name]:
            self._leave(request)

    def forget(self) -> bool:
        """Empties the cache. While requests are under way, does nothing and returns False."""
        if self.running or self.waiting:
            return False
        self.num_free += len(self._unused)
        self.news += [BlockNews(key) for key in self._unused]
        self._unused.clear()
        return True

    # Steps

    def begin_step(self) -> float:
        """Plans the next step, and returns how long it takes; 0.0 means that there is nothing to
        do."""
        budget = self.size.step_tokens
        self._plan = []
        for request in list(self.running):
            if request not in self.running or not budget:
                continue  # another one's tokens have taken its room
            chunk = min(len(request.tokens) - request.computed, budget)
            if self._make_room(request, chunk):
                self._plan.append((request, chunk))
                budget -= chunk
        self._plan = [pair for pair in self._plan if pair[0] in self.running]
        while self.waiting and budget and len(self.running) < self.size.max_sequences:
            request = self.waiting[0]
            self._take_cached(request)
            chunk = min(len(request.tokens) - request.computed, budget)
            if not self._has_room(request, chunk):
                self._give_up(request)
                break
            self.waiting.popleft()
            if request.is_new:
                request.is_new, request.cached = False, request.computed
                self.queries += request.num_prompt
                self.hits += request.computed
            self.running.append(request)
            self._hold(request, chunk)
            self._plan.append((request, chunk))
            budget -= chunk
        if not self._plan:
            return 0.0
        speed = self._speed
        prompt = sum(chunk for request, chunk in self._plan if chunk > 1)
        context = sum(request.computed for request, _ in self._plan)
        steps_s = speed.step_s + prompt * speed.prompt_token_s
        return speed.factor * (
            steps_s + len(self._plan) * speed.answer_s + context * speed.context_token_s
        )

    def end_step(self) -> list[TimedToken]:
        """Ends the planned step, and returns its results."""
        found = []
        for request, chunk in self._plan:
            if request not in self.running:
                continue  # the client of the answer has left in the meantime
            request.computed += chunk
            self._name_full_blocks(request)
            if request.computed < len(request.tokens):
                continue
            token = self._next_token(request)
            request.tokens.append(token)
            is_last = len(request.tokens) - request.num_prompt >= request.max_tokens
            found.append(TimedToken(request.name, token, request.cached, is_last))
            if is_last:
                self._leave(request)
        self._plan = []
        return found

    @staticmethod
    def _next_token(request: TimedRequest) -> int:
        """The next token follows from all tokens before it, as in greedy decoding."""
        return 300 + (sum(request.tokens[-8:]) + len(request.tokens)) % 500

    # Blocks

    def _has_room(self, request: TimedRequest, chunk: int) -> bool:
        return self._needed(request, chunk) <= self.num_free + len(self._unused)

    def _needed(self, request: TimedRequest, chunk: int) -> int:
        return -(-(request.computed + chunk) // self.size.block_tokens) - request.num_held

    def _make_room(self, request: TimedRequest, chunk: int) -> bool:
        """Preempts the newest requests until this one has room. Returns False if this one was
        preempted, too."""
        while not self._has_room(request, chunk):
            last = self.running[-1]
            self._leave(last)
            self._give_up(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is request:
                return False
        self._hold(request, chunk)
        return True

    def _hold(self, request: TimedRequest, chunk: int) -> None:
        needed = self._needed(request, chunk)
        while self.num_free < needed:
            key, _ = self._unused.popitem(last=False)
            self.news.append(BlockNews(key))
            self.num_free += 1
        self.num_free -= needed
        request.num_held += needed

    def _take_cached(self, request: TimedRequest) -> None:
        """Takes the cached blocks at the start of the request's tokens; the last token is always
        computed."""
        for key in block_keys(request, self.size.block_tokens, len(request.tokens) - 1):
            if key not in self.users and key not in self._unused:
                break
            self._unused.pop(key, None)
            self.users[key] = self.users.get(key, 0) + 1
            request.blocks.append(key)
        request.num_held = len(request.blocks)
        request.computed = request.num_held * self.size.block_tokens

    def _name_full_blocks(self, request: TimedRequest) -> None:
        size = self.size.block_tokens
        first = len(request.blocks)
        parent = request.blocks[-1] if request.blocks else None
        for number in range(first, request.computed // size):
            own = tuple(request.tokens[number * size : (number + 1) * size])
            key = _key(parent or request.salt, own)
            if key in self._unused or key in self.users:
                self.num_free += 1  # another request has computed the same: one copy is enough
                self._unused.pop(key, None)
            else:
                self.news.append(BlockNews(key, parent, own))
            self.users[key] = self.users.get(key, 0) + 1
            request.blocks.append(key)
            parent = key

    def _leave(self, request: TimedRequest) -> None:
        self.running.remove(request)
        self._give_up(request)

    def _give_up(self, request: TimedRequest) -> None:
        """Releases the request's blocks: full blocks stay cached, and the last of them are evicted
        first."""
        self.num_free += request.num_held - len(request.blocks)
        for key in reversed(request.blocks):
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]
                self._unused[key] = None
        request.blocks, request.num_held, request.computed = [], 0, 0


def block_keys(request: TimedRequest, block_tokens: int, num_tokens: int) -> Iterable[bytes]:
    """Yields the keys of the full blocks of the request's first tokens; each key depends on all
    tokens before its block, too."""
    before: bytes = request.salt
    for at in range(0, num_tokens - block_tokens + 1, block_tokens):
        before = _key(before, request.tokens[at : at + block_tokens])
        yield before


def _key(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + repr(tuple(tokens)).encode(), digest_size=16).digest()

"""A fake vLLM server with its own queue, batches, blocks and prefix cache, behind vLLM's
formats.

It answers bodies of `/v1/completions` with JSON and publishes numbered batches of KV events. Its
tokens are greedy. Each block has the content that the truth gives it, and each read checks it, so
that a block shared between two cache salts is noticed. As in vLLM, equal blocks that are computed
at the same time are kept twice, and a request is preempted if it no longer fits.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.types import BlockKey, SamplingParams
from moonpool.vllm.facts import VllmFacts, read_facts
from tests.sim.clock import Link
from tests.sim.truth import EOS, Truth, greedy

if TYPE_CHECKING:
    from tests.sim.vllm_node import VllmLife
    from tests.sim.world import World

HOLD_S = 20.0
"""The time for which a prefill's blocks wait for the decode server that fetches them."""


@dataclass(eq=False)
class Served:
    """One request, on one connection of a client."""

    life: VllmLife
    work: AttemptSpec
    body: dict[str, Any]
    truth: Truth
    down: Link
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # hashes of all full blocks of `tokens`
    num_computed: int = 0
    num_sent: int = 0
    ended: bool = False

    @property
    def attempt_id(self) -> AttemptId:
        return self.work.attempt_id

    @property
    def num_prompt(self) -> int:
        return len(self.body["prompt"])

    @property
    def hands_over(self) -> bool:
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))


class VllmServer:
    """The process at one address. `generation` counts its starts."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life: VllmLife | None = None  # the adapter that follows the server's KV events
        self.generation = 0
        self._block_tokens = world.options.block_tokens
        self._start()

    def _start(self) -> None:
        self.generation += 1
        self.num_batches = 0
        # number of copies of each public block in the prefix cache
        self.kept: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(1, self.world.options.num_blocks)
        )
        self._refs: dict[int, int] = {}
        self._contents: dict[int, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._key_of: dict[int, BlockKey | None] = {}
        self._cached: dict[bytes, list[int]] = {}
        self._waiting: list[Served] = []
        self._receiving: list[Served] = []
        self._running: list[Served] = []
        self._pinned: dict[str, tuple[int, ...]] = {}
        self._num_pins = 0
        self._news: list[list[Any]] = []
        self._stepping = False
        self._full = False  # whether the next request waits for blocks

    # Reports of the server:

    def facts(self) -> VllmFacts:
        longest = (self.world.options.num_blocks - 1) * self._block_tokens  # without the null block
        models = {"data": [{"id": "fake", "root": "fake", "max_model_len": longest}]}
        caches = self.world.options.prefix_caching
        metrics = (
            f'vllm:cache_config_info{{block_size="{self._block_tokens}",'
            f'num_gpu_blocks="{self.world.options.num_blocks}",'
            f'enable_prefix_caching="{caches}"}} 1\n'
        )
        return read_facts(msgspec.json.encode(models), metrics)

    def attempts(self) -> list[AttemptId]:
        return [served.attempt_id for served in self._all()]

    def check_end(self) -> None:
        assert not self._all() and not self._pinned and not self._refs, f"{self.name} holds blocks"

    def _all(self) -> list[Served]:
        return [*self._waiting, *self._receiving, *self._running]

    # Requests:

    def submit(self, life: VllmLife, work: AttemptSpec, body: bytes) -> Served:
        parsed = msgspec.json.decode(body)
        truth = self.world.truth_of(work.attempt_id)
        down = Link(life.clock, self.world.options.slow_delay_s)
        served = Served(life, work, parsed, truth, down, list(parsed["prompt"]))
        life.later(lambda: self._accept(served, self.generation))
        return served

    def cancel(self, served: Served) -> None:
        """Closes the client's connection; the server notices later."""
        served.down.cut = True
        self.world.clock.soon(self.world.options.slow_delay_s, lambda: self._abort(served))

    def leave(self, life: VllmLife) -> None:
        """Ends the client's process."""
        for served in self._all():
            if served.life is life:
                self.cancel(served)

    def crash(self) -> None:
        """Ends the process and starts it again, empty."""
        for served in self._all():
            served.ended = True
            served.down.cut = True
            served.life.later(lambda s=served: s.life.on_error(s, "no server listens there"))
        self._start()

    def _accept(self, served: Served, generation: int) -> None:
        sampling = served.truth.request.sampling
        assert tuple(served.tokens) == served.truth.tokens[: len(served.tokens)], "another prompt"
        assert not served.body["temperature"]
        assert served.body["ignore_eos"] == sampling.ignore_eos
        assert tuple(served.body["stop_token_ids"]) == sampling.stop_token_ids
        if served.down.cut or served.ended:
            return
        if generation != self.generation or self.world.chance("refuse_connection_rate"):
            self._fail(served, "no server listens there")
            return
        if len(served.tokens) + served.body["max_tokens"] > self.facts().offer.max_model_tokens:
            served.ended = True
            message = "This model's maximum context length is exceeded"
            served.down.carry(lambda: served.life.on_error(served, message, refused=True))
            return
        self.world.seen["vLLM requests"] += 1
        self._name_blocks(served)
        self._waiting.append(served)
        self._wake()

    def _abort(self, served: Served) -> None:
        if served.ended or served not in self._all():
            served.ended = True
            return
        self._end(served)
        self._wake()

    def _end(self, served: Served) -> None:
        served.ended = True
        for group in (self._waiting, self._receiving, self._running):
            if served in group:
                group.remove(served)
        self._release(served)

    def _fail(self, served: Served, message: str) -> None:
        """Breaks the connection."""
        self._end(served)
        served.down.carry(lambda: served.life.on_error(served, message))

    def _answer(self, served: Served, event: dict[str, Any]) -> None:
        payload = msgspec.json.encode(event)
        served.down.carry(lambda: served.life.on_answer(served, payload))

    # Steps:

    def _wake(self) -> None:
        if not self._stepping and (self._waiting or self._running):
            self._stepping = True
            generation = self.generation
            delay_s = 0.002 + self.world.clock.delay_s(self.world.options.slow_delay_s)
            self.world.clock.after(delay_s, lambda: self._step(generation))

    def _step(self, generation: int) -> None:
        if generation != self.generation:
            return
        self._stepping = False
        self._admit()
        for served in list(self._running):
            if served in self._running:
                self._compute(served)
        self._publish()
        if self._running or not self._full:
            self._wake()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.world.options.max_sequences:
            served = self._waiting[0]
            self._match(served)
            params = served.body.get("kv_transfer_params") or {}
            remote = bool(params.get("do_remote_prefill")) and not served.num_sent
            num_tokens = served.num_prompt if remote else self._chunk_end(served)
            if not self._grow(served, num_tokens):
                self._release(served)
                self._full = True
                return
            self._waiting.remove(served)
            if remote:
                self._receiving.append(served)
                served.body["kv_transfer_params"] = None
                self._receive_later(served, params)
            else:
                self._running.append(served)

    def _chunk_end(self, served: Served) -> int:
        return min(len(served.tokens), served.num_computed + self.world.options.chunk_tokens)

    def _compute(self, served: Served) -> None:
        end = self._chunk_end(served)
        while not self._grow(served, end):
            last = self._running[-1]
            self._preempt(last)
            if last is served:
                return
        self._check_read(served)
        self._write(served, end)
        if end < len(served.tokens):
            return
        if self.world.chance("step_failure_rate"):
            self._end(served)
            choice = {"token_ids": [], "finish_reason": "abort"}
            error = {"error": {"message": "the engine failed", "code": 500}}
            self._answer(served, {"choices": [choice]} if len(served.tokens) % 2 else error)
        else:
            self._draw(served)

    def _preempt(self, served: Served) -> None:
        self.world.seen["vLLM preemptions"] += 1
        self._running.remove(served)
        self._waiting.insert(0, served)
        self._release(served)

    def _draw(self, served: Served) -> None:
        body, tokens = served.body, served.tokens
        assert len(tokens) < len(served.truth.tokens), "computes past the end of the answer"
        prefix = 0
        for token in tokens:
            prefix = hash((prefix, token))
        sampling = SamplingParams(temperature=0.0, stop_token_ids=tuple(body["stop_token_ids"]))
        token = greedy(prefix, len(tokens), sampling, served.num_sent < body["min_tokens"])
        stops = {*body["stop_token_ids"], *(() if body["ignore_eos"] else (EOS,))}
        if served.hands_over and token not in stops and self.world.chance("near_tie_rate"):
            token = 9 + token % 80  # a random token that is not a stop token, and mostly differs
        tokens.append(token)
        self._name_blocks(served)
        served.num_sent += 1
        finish = "length" if served.num_sent == body["max_tokens"] else None
        if token in stops and served.num_sent >= body["min_tokens"]:
            finish = "stop"
        event: dict[str, Any] = {
            "choices": [{"text": "x", "token_ids": [token], "finish_reason": finish}]
        }
        if finish == "length" and served.hands_over:
            event["kv_transfer_params"] = self._pin(served)
        if self.world.chance("break_rate", 0.2):
            self._fail(served, "vLLM closed the connection in the middle of an output")
            return
        if finish is not None:
            self._end(served)
        self._answer(served, event)

    # Handover:

    def _pin(self, served: Served) -> dict[str, Any]:
        """Keeps the prompt's blocks until they are fetched or the time is over."""
        self._num_pins += 1
        pin = f"{served.attempt_id}#{self._num_pins}"
        used = served.blocks[: -(-served.num_prompt // self._block_tokens)]
        self._pinned[pin] = tuple(used)
        for block in used:
            self._refs[block] += 1
        generation = self.generation
        self.world.clock.after(HOLD_S, lambda: self.unpin(pin, generation))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.name}/{self.generation}",
            "remote_block_ids": used,
            "remote_host": self.name,
            "remote_port": 5600,
            "remote_request_id": pin,
        }

    def unpin(self, pin: str, generation: int) -> None:
        if generation == self.generation:
            self._drop(self._pinned.pop(pin, ()))
            self._wake()

    def read_pinned(self, pin: str, engine_id: str) -> list[int] | None:
        """Returns the contents of the pinned blocks, or None if they are gone."""
        if engine_id != f"{self.name}/{self.generation}" or pin not in self._pinned:
            return None
        contents = [self._contents[block] for block in self._pinned[pin]]
        generation = self.generation
        self.world.clock.soon(self.world.options.slow_delay_s, lambda: self.unpin(pin, generation))
        return contents

    def _receive_later(self, served: Served, params: dict[str, Any]) -> None:
        generation, slow_delay_s = self.generation, self.world.options.slow_delay_s
        self.world.clock.soon(slow_delay_s, lambda: self._receive(served, params, generation))

    def _receive(self, served: Served, params: dict[str, Any], generation: int) -> None:
        if generation != self.generation or served.ended:
            return
        self._receiving.remove(served)
        source = self.world.vllm_servers[params["remote_host"]]
        contents = source.read_pinned(params["remote_request_id"], params["remote_engine_id"])
        if contents is None or self.world.chance("handover_loss_rate"):
            self.world.seen["vLLM handovers lost"] += 1
            self._release(served)
            if len(served.tokens) % 2:  # both values of `kv_load_failure_policy` are played
                self._waiting.insert(0, served)
            else:
                served.ended = True
                choice = {"token_ids": [], "finish_reason": "error"}
                self._answer(served, {"choices": [choice]})
            self._wake()
            return
        self.world.seen["vLLM handovers"] += 1
        right = [self._right(served, i, served.num_prompt) for i in range(len(contents))]
        assert contents == right, f"{served.attempt_id}: fetches another prompt's blocks"
        self._write(served, served.num_prompt)
        served.num_computed = served.num_prompt - 1  # the last token is computed again
        self._running.append(served)
        self._publish()
        self._wake()

    # Blocks:

    def _right(self, served: Served, index: int, num_tokens: int) -> int:
        return served.truth.contents[min(num_tokens, (index + 1) * self._block_tokens)]

    def _name_blocks(self, served: Served) -> None:
        """Computes vLLM's own hashes: of the parent, the tokens, and the first block's salt."""
        size = self._block_tokens
        for index in range(len(served.names), len(served.tokens) // size):
            parent = served.names[-1] if index else (served.body.get("cache_salt") or "").encode()
            tokens = served.tokens[index * size : (index + 1) * size]
            served.names.append(
                hashlib.sha256(parent + repr((index == 0, tokens)).encode()).digest()
            )

    def _match(self, served: Served) -> None:
        """Takes the cached blocks of a prefix, without the last token's block."""
        assert not served.blocks
        served.num_computed = 0
        for name in served.names[: (len(served.tokens) - 1) // self._block_tokens]:
            found = self._cached.get(name)
            if not found:
                break
            self._hold(found[0])
            served.blocks.append(found[0])
            served.num_computed += self._block_tokens
            self.world.seen["vLLM hits"] += 1
        self._check_read(served)

    def _check_read(self, served: Served) -> None:
        for index in range(-(-served.num_computed // self._block_tokens)):
            right = self._right(served, index, served.num_computed)
            full = served.truth.contents[
                min(len(served.truth.contents) - 1, (index + 1) * self._block_tokens)
            ]
            found = self._contents[served.blocks[index]]
            assert found in (right, full, self._right(served, index, served.num_computed + 1)), (
                f"{served.attempt_id} reads a block of another prompt or tenant"
            )

    def _grow(self, served: Served, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._block_tokens) - len(served.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            served.blocks.append(block)
        return True

    def _write(self, served: Served, end: int) -> None:
        """Notes that the tokens up to `end` were computed or received, and caches the blocks that
        become full."""
        size, first = self._block_tokens, served.num_computed // self._block_tokens
        for index in range(first, -(-end // size)):
            self._contents[served.blocks[index]] = self._right(served, index, end)
        served.num_computed = end
        if self.world.options.prefix_caching:
            fresh = [i for i in range(first, end // size) if served.blocks[i] not in self._name_of]
            self._cache(served, fresh)

    def _cache(self, served: Served, indices: Sequence[int]) -> None:
        if not indices:
            return
        assert list(indices) == list(range(indices[0], indices[-1] + 1))
        size, first = self._block_tokens, indices[0]
        private = not served.truth.request.use_cache
        keys = list(served.truth.named_contents(self.world.layout))
        for index in indices:
            block, name = served.blocks[index], served.names[index]
            self._name_of[block] = name
            self._cached.setdefault(name, []).append(block)
            key = None if private else keys[index]
            self._key_of[block] = key
            if key is not None:
                self.kept[key] = self.kept.get(key, 0) + 1
        names = [served.names[index] for index in indices]
        parent = served.names[first - 1] if first else None
        tokens = served.tokens[first * size : (indices[-1] + 1) * size]
        salt = served.body.get("cache_salt")
        extra = [[salt] if index == 0 and salt else None for index in indices]
        self._news.append(["BlockStored", names, parent, tokens, size, None, "GPU", None, extra])

    def _forget(self, block: int) -> None:
        """Evicts a cached block."""
        name = self._name_of.pop(block, None)
        if name is None:
            return
        self._cached[name].remove(block)
        if not self._cached[name]:
            del self._cached[name]
        key = self._key_of.pop(block)
        if key is not None:
            self.kept[key] -= 1
            if not self.kept[key]:
                del self.kept[key]
        self.world.seen["vLLM evictions"] += 1
        self._news.append(["BlockRemoved", [name], "GPU"])

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._refs[block] = self._refs.get(block, 0) + 1

    def _release(self, served: Served) -> None:
        self._drop(served.blocks)
        served.blocks, served.num_computed = [], 0

    def _drop(self, blocks: Sequence[int]) -> None:
        self._full = False
        for block in reversed(blocks):  # the end of a prompt is evicted first
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._free[block] = None

    def _publish(self) -> None:
        if not self._news:
            return
        payload, self._news = msgspec.msgpack.encode([self.world.clock.now, self._news]), []
        number, self.num_batches = self.num_batches, self.num_batches + 1
        if self.life is not None and not self.world.chance("lost_batch_rate"):
            self.life.hear(self.generation, number, payload)

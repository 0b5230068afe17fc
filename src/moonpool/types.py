"""Types shared by all packages: identifiers, roles, service levels and the request itself.

All these types are immutable `msgspec` structs. State machines handle the same types that travel
between processes; there are no separate wire types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import inf
from typing import Literal, NewType, overload

import msgspec

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
BlockKey = NewType("BlockKey", bytes)
"""Content name of one full block: 16 bytes, chained to its parent (see `protocol.block_layout`)."""
BlockId = NewType("BlockId", int)
"""Index of a physical block inside one instance's arena."""

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are not a message: their text may not be UTF-8, or they
nest too deeply."""


class Role(StrEnum):
    """The part of a request that an instance serves. A mixed instance serves both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    """Why a request's answer ended, with OpenAI's names where there are any."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


Pooling = Literal["none", "last", "mean"]
"""How the final hidden states of a prompt become its embedding: the state of the last token, or the
mean of all. "none" means that a token is drawn instead."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all shared values: immutable, keyword-only, strict when decoded."""


class Slo(Struct, frozen=True, omit_defaults=True):
    """Service levels of one request: time to first token, and time between tokens, in seconds.

    If neither the client nor the operator has stated a level, a level is assumed, as a yardstick
    for placement and reports. No request is refused for an assumed level. `class_name`: the class
    of requests by which it is counted; "" means that the configuration has no classes.
    """

    ttft_s: float
    tbt_s: float
    ttft_stated: bool = True
    tbt_stated: bool = True
    class_name: str = ""

    def with_own(self, ttft_s: float | None, tbt_s: float | None) -> Slo:
        """Returns these levels, except for those that the request states itself."""
        if ttft_s is None and tbt_s is None:
            return self
        return Slo(
            ttft_s=self.ttft_s if ttft_s is None else ttft_s,
            tbt_s=self.tbt_s if tbt_s is None else tbt_s,
            ttft_stated=self.ttft_stated or ttft_s is not None,
            tbt_stated=self.tbt_stated or tbt_s is not None,
            class_name=self.class_name,
        )

    @property
    def limits(self) -> Slo:
        """The service levels that were stated; infinite in place of an assumed one."""
        if self.ttft_stated and self.tbt_stated:
            return self
        return Slo(
            ttft_s=self.ttft_s if self.ttft_stated else inf,
            tbt_s=self.tbt_s if self.tbt_stated else inf,
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """The names of the levels that nobody has stated."""
        stated = (("ttft_s", self.ttft_stated), ("tbt_s", self.tbt_stated))
        return tuple(name for name, is_stated in stated if not is_stated)


class BadWord(Struct, frozen=True, array_like=True):
    """A word that no answer contains: its text, and each sequence of tokens that writes it."""

    text: str
    token_ids: tuple[tuple[int, ...], ...]


class SamplingParams(Struct, frozen=True):
    """How the next token is drawn. `temperature == 0` means greedy decoding, and the other limits
    are then ignored.

    `seed` is always a number: the API draws one if the client sets none. Each draw is keyed by
    (seed, position), so the same request gives the same answer in any batch, on any instance,
    before and after a fault.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means no limit
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # factor by which the logits of tokens in prompt or answer are divided
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    # None: no logprobs; k >= 0: logprobs of the chosen token and of the k most likely ones
    logprobs: int | None = None
    # the same number for each token of the prompt except the first
    prompt_logprobs: int | None = None
    # grammar that the answer must match (see `text.grammar`); "" means no constraint
    grammar: str = ""
    pooling: Pooling = "none"  # how the prompt's embedding is made, in place of the first token
    allowed_token_ids: tuple[int, ...] = ()  # only these tokens are drawn; () means all
    bad_words: tuple[BadWord, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()  # tokens that `logprobs` lists, besides the drawn one


PRIORITY_RANGE = (-(2**31), 2**31 - 1)
SAMPLING_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Least and greatest value of each parameter, in a request and in a model's defaults."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token, and of the most likely ones as (token id, logprob).
    `rank`: the place of a prompt's token among all tokens, from 1 on; 0 means unknown."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class Token(Struct, frozen=True, array_like=True):
    """One generated token. The first token brings the logprobs of the prompt from its second token
    on, if `SamplingParams.prompt_logprobs` asks for them.

    With `SamplingParams.pooling` there is no generated token: `payload` is the prompt's embedding,
    normalised to length 1, as little-endian float32. In a forwarded call, `payload` is a part of
    the response; the first part begins with a line that holds the content type."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] | None = None
    payload: bytes = b""


class TraceContext(Struct, frozen=True):
    """The place of a request in a distributed trace (W3C Trace Context, ids in hexadecimal).

    `span_id` is the id of this server's span, and `parent_id` that of the client's; "" means that
    the client sent none. `exported`: whether this server sends the spans of the request to a
    collector.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True
    exported: bool = False

    @property
    def traceparent(self) -> str:
        """The header for whatever works for this request."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


LEAD = "lead"
"""The agent that a task begins with, as vllm-router names it: "TASK:lead" is the program "TASK"."""


class ProgramContext(Struct, frozen=True, omit_defaults=True):
    """What a client says about the program (agent) that a call belongs to; "" and 0 mean that it
    says nothing.

    `parent_id`: the program that started this one, and that waits for it if `blocks_parent`.
    `root_id`: the program that started first, directly or indirectly. `kind`: what programs like
    this one have in common, such as the name of a workflow or of a sort of sub-agent. `tool`: the
    tool that runs when the call has ended. `expected_tokens`: the expected length of the answer.
    `ends`: whether no call follows this one. `keep_s`: how long the client asks to keep the
    program's blocks. `priority`: calls with a greater one are served first.
    """

    program_id: str
    parent_id: str = ""
    root_id: str = ""
    blocks_parent: bool = True
    kind: str = ""
    tool: str = ""
    expected_tokens: int = 0
    ends: bool = False
    keep_s: float | None = None
    priority: int = 0


class Request(Struct, frozen=True):
    """A prompt and its parameters. `arrived_s` and `deadline_s` are on the driver's clock.

    `tenant` salts the block keys: requests of different tenants never share a block, except for
    tenants that only pay separately (`paying`). `use_cache` False neither reads from nor writes to
    the KVCache pool. `keys` are the keys of the prompt's full blocks if they are known without its
    tokens (a trace has block keys, and no text), or None if they follow from the tokens. `adapter`
    identifies the LoRA adapter of the request; "" means none. Block keys contain it. Requests with
    a lower `priority` are served first. `call` names the call of which this is one of several
    choices; "" means that it is the only choice.

    `forwarded`: whether a vLLM server gets the client's own body, and its response is passed on.
    The tokens are then an estimate of the prompt, and no other instance can continue the answer.
    `within`: only these instances may serve it; None means that all may. `pinned`: whether it stays
    where it is placed first, because a gateway sends its call there. `program`: the program of
    which this request is a call, or None if its client names none.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    sampling: SamplingParams
    slo: Slo
    arrived_s: float
    deadline_s: float
    tenant: str = ""
    use_cache: bool = True
    keys: tuple[BlockKey, ...] | None = None
    trace: TraceContext | None = None
    adapter: str = ""
    priority: int = 0
    call: str = ""
    forwarded: bool = False
    within: tuple[InstanceId, ...] | None = None
    program: ProgramContext | None = None
    pinned: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_embedding(self) -> bool:
        """Whether the prompt's embedding is the answer, which is not an answer of one token."""
        return self.sampling.pooling != "none"


def payer_of(tenant: str) -> str:
    """Returns the tenant whose share counts: cache salts do not multiply it."""
    return tenant.partition("/")[0]


def paying(payer: str, salt: str = "") -> str:
    """Returns the tenant that has this payer, and whose blocks all tenants with this salt share. No
    client can name this tenant: its part after the payer is empty or begins with '/', and salts of
    clients do neither (`api.call_headers.tenant_of`)."""
    if salt:
        return f"{payer}//{salt}"
    return f"{payer}/" if payer else ""


def salt_part(tenant: str) -> str:
    """Returns the part of a tenant's name that salts its block keys. Tenants with the same part
    share their blocks, and so do those with ""."""
    _, slash, salt = tenant.partition("/")
    return salt if slash and (not salt or salt.startswith("/")) else tenant


class Tokens(Sequence[int]):
    """Prompt and generated tokens as one sequence that grows at its end.

    The prompt is shared and never copied, because it may hold a million tokens. The sequence is
    only sliced, so it may be a `range` if the values of the tokens do not matter.
    """

    __slots__ = ("_generated", "_prompt", "_prompt_ids", "first_generated", "size")

    def __init__(self, prompt: Sequence[int], num_prompt_tokens: int) -> None:
        """After a fault, `prompt` holds earlier generated tokens past `num_prompt_tokens`."""
        self._prompt = prompt
        self.first_generated = num_prompt_tokens  # the index of the first token of the answer
        self._generated: list[int] = []
        self._prompt_ids: frozenset[int] | None = None
        self.size = len(prompt)  # equals `len`, but costs no call, because every step reads it

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            assert step == 1
            return self.between(start, stop)
        size = len(self._prompt)
        position = index + self.size if index < 0 else index
        return self._prompt[position] if position < size else self._generated[position - size]

    def between(self, start: int, stop: int) -> Sequence[int]:
        """Returns `[start:stop]`; neither may be negative or beyond the end."""
        size = len(self._prompt)
        if stop <= size:
            return self._prompt[start:stop]
        if start >= size:
            return self._generated[start - size : stop - size]
        return (*self._prompt[start:], *self._generated[: stop - size])

    @property
    def newest(self) -> int:
        """Returns the last token."""
        return self._generated[-1] if self._generated else self._prompt[-1]

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        self._generated.append(token_id)
        self.size += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds generated tokens."""
        self._generated.extend(token_ids)
        self.size = len(self._prompt) + len(self._generated)

    def pop(self) -> int:
        """Removes and returns the newest token, which must have been appended."""
        token_id = self._generated.pop()
        self.size -= 1
        return token_id

    @property
    def generated(self) -> Sequence[int]:
        """Returns all tokens after the request's prompt; callers must not change them."""
        if self.first_generated == len(self._prompt):
            return self._generated
        return (*self._prompt[self.first_generated :], *self._generated)

    @property
    def prompt_ids(self) -> frozenset[int]:
        """The distinct tokens of the prompt, computed at the first use."""
        if self._prompt_ids is None:
            self._prompt_ids = frozenset(self._prompt)
        return self._prompt_ids

    @property
    def num_generated(self) -> int:
        """Number of tokens after the request's prompt."""
        return self.size - self.first_generated

"""Messages between the first process of an instance and its other stages or ranks.

The messages are length-prefixed msgpack frames on a socket pair. Both ends run the same program on
one machine.

first stage                                   stage k
  | -- StageSetup, with the descriptors --------> |
  |                            loads its layers   |
  | <------------ StageReady or StageFailed ----- |
  | -- StageArriving (on GPUs only) ------------> |
  | -- StageStep (rows, what to draw) ----------> |   activations: stage k-1, through a ring
  | <------------ LayerDone, one per layer ------ |
  | <------------ StepDone (tokens of the last) - |   activations: to stage k+1
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool.framing import Framing
from moonpool.types import SamplingParams, Struct, Token
from moonpool_engine.engine.ops import StepMeta
from moonpool_engine.engine.sampler import Draw

_FRAMES = Framing(">", max_bytes=1 << 28)


class StageSetup(Struct, frozen=True, tag=True):
    """The setup of a pipeline stage (`stage_process`): its layers, rings, cores and device."""

    model: str
    dtype: str
    quantization: Quantization
    kv_dtype: str
    block_tokens: int
    num_blocks: int
    fingerprint: bytes  # fingerprint of the first stage's block layout
    first_layer: int
    end_layer: int
    threads: int
    cores: tuple[int, ...]  # (): any
    slot_bytes: int
    num_slots: int
    lora_modules: tuple[str, ...] = ()
    device: str = "cpu"  # on a GPU, the stage computes in GPU blocks and copies them to the arena


class RankSetup(Struct, frozen=True, tag=True):
    """The setup of a tensor-parallel rank (`tensor_process`)."""

    model: str
    dtype: str
    quantization: Quantization
    kv_dtype: str
    lora_modules: tuple[str, ...]
    block_tokens: int
    num_blocks: int
    fingerprint: bytes  # fingerprint of the first rank's block layout
    rank: int
    num_ranks: int
    num_shards: int
    threads: int
    cores: tuple[int, ...]  # (): any
    secret: bytes  # proves a rank's identity to other ranks over gloo; empty with shared memory


class StageReady(Struct, frozen=True, tag=True):
    """The peer has loaded its weights and mapped the arena."""


class StageFailed(Struct, frozen=True, tag=True):
    """The peer cannot start; `message` is one line with the reason."""

    message: str


class StageDraw(Struct, frozen=True):
    """One `Draw` on the wire. `position` is the position of the first new token in its sequence."""

    params: SamplingParams
    generated: tuple[int, ...]
    position: int
    prompt_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


class StageStep(Struct, frozen=True, tag=True):
    """A step's rows (see `StepMeta`), as raw int32.

    `announced`: whether the peer reports every layer (`LayerDone`). `wanted`, raw int64, are the
    rows whose logits are needed; `draws` says how to draw from them. Only the last stage gets both;
    a rank gets only `wanted`.
    """

    number: int
    positions: bytes
    row_starts: bytes
    context_starts: bytes
    block_tables: bytes
    announced: bool
    adapters: tuple[int, ...] = ()
    unchecked: tuple[int, ...] = ()
    wanted: bytes = b""
    draws: tuple[StageDraw, ...] = ()


class StageArriving(Struct, frozen=True, tag=True):
    """The messenger is about to write these blocks of the arena. This message is only sent to
    stages on GPUs."""

    block_ids: tuple[int, ...]


class LayerDone(Struct, frozen=True, tag=True):
    """A layer of step `number` is in the arena."""

    number: int
    layer: int


class StepDone(Struct, frozen=True, tag=True):
    """A stage has finished a step. `error` is the reason if the step failed, or "". `tokens`: the
    drawn tokens, by draw."""

    number: int
    seconds: float
    tokens: tuple[tuple[Token, ...], ...] = ()
    error: str = ""


FromFirst = StageSetup | RankSetup | StageStep | StageArriving
FromOther = StageReady | StageFailed | LayerDone | StepDone
_TO_OTHER: msgspec.msgpack.Decoder[FromFirst] = msgspec.msgpack.Decoder(FromFirst)
_TO_FIRST: msgspec.msgpack.Decoder[FromOther] = msgspec.msgpack.Decoder(FromOther)


def frame(message: FromFirst | FromOther) -> bytes:
    """The message as bytes, with its length in front."""
    return _FRAMES.framed(msgspec.msgpack.encode(message))


_Setup = TypeVar("_Setup", StageSetup, RankSetup)


def receive_setup(
    sock: socket.socket, num_fds: int, kind: type[_Setup]
) -> tuple[_Setup, list[int]]:
    """Receives the first frame and the descriptors sent with it. Raises ConnectionError."""
    start, fds, _, _ = socket.recv_fds(sock, _FRAMES.NUM_LENGTH_BYTES, num_fds)
    if len(start) != _FRAMES.NUM_LENGTH_BYTES:
        raise ConnectionError("the first process has ended")
    setup = _TO_OTHER.decode(_receive(sock, _FRAMES.num_body_bytes(start)))
    assert isinstance(setup, kind)
    return setup, fds


def receive_order(sock: socket.socket) -> StageStep | StageArriving:
    """Receives the next order. Raises ConnectionError if the first process has ended."""
    order = _TO_OTHER.decode(_FRAMES.read(partial(_receive, sock)))
    assert isinstance(order, StageStep | StageArriving)
    return order


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the first process has ended")
        parts += part
    return bytes(parts)


class Inbox:
    """Assembles one peer's frames from received bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[FromOther]:
        """Yields the messages that are complete with `data`."""
        self._bytes += data
        yield from map(_TO_FIRST.decode, _FRAMES.pop_all(self._bytes))


def pack_step(number: int, meta: StepMeta, announced: bool) -> StageStep:
    """The step as stages before the last one receive it."""
    return StageStep(
        number=number,
        positions=_raw(meta.positions),
        row_starts=_raw(meta.row_starts),
        context_starts=_raw(meta.context_starts),
        block_tables=_raw(meta.block_tables),
        announced=announced,
        adapters=meta.adapters,
        unchecked=meta.unchecked,
    )


def with_draws(
    step: StageStep, wanted: NDArray[np.int64], draws: Sequence[Draw], positions: Sequence[int]
) -> StageStep:
    """The step as the last stage receives it. wanted: the rows to draw from."""
    packed = tuple(_pack_draw(*pair) for pair in zip(draws, positions, strict=True))
    return msgspec.structs.replace(step, wanted=wanted.tobytes(), draws=packed)


def unpack_meta(step: StageStep) -> StepMeta:
    """The step's rows; see `StepMeta`."""
    positions = _int32(step.positions)
    context_starts = _int32(step.context_starts)
    num_sequences = len(context_starts)
    return StepMeta(
        positions=positions,
        row_starts=_int32(step.row_starts),
        context_starts=context_starts,
        block_tables=_int32(step.block_tables).view(num_sequences, -1),
        num_rows=len(positions),
        num_sequences=num_sequences,
        adapters=step.adapters,
        unchecked=step.unchecked,
    )


def unpack_wanted(step: StageStep) -> Tensor | None:
    """Returns [wanted rows] int64, or None if no row's logits are needed."""
    if not step.wanted:
        return None
    return torch.from_numpy(np.frombuffer(step.wanted, np.int64).copy())


def unpack_draws(step: StageStep, eos_token_ids: Sequence[int]) -> list[Draw]:
    """The step's draws, with the end tokens of the stage's own model."""
    return [
        Draw(draw.params, draw.generated, eos_token_ids, frozenset(draw.prompt_ids), draw.drafts)
        for draw in step.draws
    ]


def _pack_draw(draw: Draw, position: int) -> StageDraw:
    """Sends the generated tokens only if the draw reads them, because there may be many."""
    params, generated = draw.params, tuple(draw.generated)
    penalties = params.presence_penalty or params.frequency_penalty or draw.prompt_ids
    looked_at = penalties or params.grammar or params.bad_words
    if not looked_at and len(generated) >= params.min_tokens:
        params, generated = msgspec.structs.replace(params, min_tokens=0), ()
    return StageDraw(
        params=params,
        generated=generated,
        position=position,
        prompt_ids=tuple(draw.prompt_ids),
        drafts=tuple(draw.drafts),
    )


def _raw(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _int32(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, np.int32).copy())

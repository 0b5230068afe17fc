"""What the first stage and the others say to each other, and how: frames on a socket that the
others inherit. Both ends are one program on one machine, started together.

first stage                                   stage k
  | -- StageSetup, and the descriptors ---------> |
  |                            loads its layers   |
  | <------------ StageReady or StageFailed ----- |
  | -- StageArriving (on GPUs only) ------------> |
  | -- StageStep (rows, what to draw) ----------> |   activations: stage k-1, through a ring
  | <------------ LayerDone, one per layer ------ |
  | <------------ StepDone (tokens of the last) - |   activations: to stage k+1
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.config import Quantization
from moonpool.engine.ops import StepMeta
from moonpool.engine.step import Draw
from moonpool.types import SamplingParams, Struct, Token

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 28


class StageSetup(Struct, frozen=True, tag=True):
    model: str
    dtype: str
    quantization: Quantization
    block_tokens: int
    num_blocks: int
    fingerprint: bytes  # of the first stage's block layout
    first_layer: int
    end_layer: int
    threads: int
    cores: tuple[int, ...]  # on which it computes; (): any
    slot_bytes: int
    num_slots: int
    device: str = "cpu"  # on another one, it has blocks of its own there, beside the arena's


class RankSetup(Struct, frozen=True, tag=True):
    """What a rank gets in the place of a StageSetup: see `engine.tensor`."""

    model: str
    dtype: str
    quantization: Quantization
    block_tokens: int
    num_blocks: int
    fingerprint: bytes  # of the first rank's block layout
    rank: int
    num_ranks: int
    num_shards: int
    threads: int
    cores: tuple[int, ...]  # on which it computes; (): any
    secret: bytes  # by which ranks know each other that meet through gloo; else empty


class StageReady(Struct, frozen=True, tag=True):
    """The layers are loaded and the arena is mapped."""


class StageFailed(Struct, frozen=True, tag=True):
    """The stage cannot start; one line says why."""

    message: str


class StageDraw(Struct, frozen=True):
    params: SamplingParams
    generated: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    position: int
    prompt_ids: tuple[int, ...] = ()


class StageStep(Struct, frozen=True, tag=True):
    """A step's rows (see `StepMeta`), as raw int32. `draws` are for the last stage alone; `wanted`
    are the rows they are drawn after, as raw int64."""

    number: int
    positions: bytes
    row_starts: bytes
    context_starts: bytes
    block_tables: bytes
    announced: bool
    wanted: bytes = b""
    draws: tuple[StageDraw, ...] = ()


class StageArriving(Struct, frozen=True, tag=True):
    """Others are about to write these blocks of the arena. Only for stages that mirror it."""

    block_ids: tuple[int, ...]


class LayerDone(Struct, frozen=True, tag=True):
    number: int
    layer: int


class StepDone(Struct, frozen=True, tag=True):
    """`error`: why the stage could not compute it, "" if it could."""

    number: int
    seconds: float
    tokens: tuple[Token, ...] = ()
    error: str = ""


FromFirst = StageSetup | RankSetup | StageStep | StageArriving
FromOther = StageReady | StageFailed | LayerDone | StepDone
_TO_OTHER: msgspec.msgpack.Decoder[FromFirst] = msgspec.msgpack.Decoder(FromFirst)
_TO_FIRST: msgspec.msgpack.Decoder[FromOther] = msgspec.msgpack.Decoder(FromOther)


def frame(message: FromFirst | FromOther) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


_Setup = TypeVar("_Setup", StageSetup, RankSetup)


def receive_setup(
    sock: socket.socket, num_fds: int, kind: type[_Setup]
) -> tuple[_Setup, list[int]]:
    """The first frame, and the descriptors that come with it. Raises ConnectionError."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, num_fds)
    if len(head) != _LENGTH.size:
        raise ConnectionError("the first stage is gone")
    setup = _TO_OTHER.decode(_receive(sock, _length(head)))
    assert isinstance(setup, kind)
    return setup, fds


def receive_step(sock: socket.socket) -> StageStep:
    """Raises ConnectionError once the first stage is gone."""
    step = receive_order(sock)
    assert isinstance(step, StageStep)
    return step


def receive_order(sock: socket.socket) -> StageStep | StageArriving:
    """Raises ConnectionError once the first stage is gone."""
    order = _TO_OTHER.decode(_receive(sock, _length(_receive(sock, _LENGTH.size))))
    assert isinstance(order, StageStep | StageArriving)
    return order


def _length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes")
    return length


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the first stage is gone")
        parts += part
    return bytes(parts)


class Inbox:
    """Frames of one stage as they come in, however they are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[FromOther]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _length(bytes(self._bytes[: _LENGTH.size]))
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield _TO_FIRST.decode(body)


def pack_step(number: int, meta: StepMeta, announced: bool) -> StageStep:
    return StageStep(
        number=number,
        positions=_raw(meta.positions),
        row_starts=_raw(meta.row_starts),
        context_starts=_raw(meta.context_starts),
        block_tables=_raw(meta.block_tables),
        announced=announced,
    )


def with_draws(
    step: StageStep, wanted: NDArray[np.int64], draws: Sequence[Draw], positions: Sequence[int]
) -> StageStep:
    """As the last stage gets it."""
    packed = tuple(_pack_draw(*pair) for pair in zip(draws, positions, strict=True))
    return msgspec.structs.replace(step, wanted=wanted.tobytes(), draws=packed)


def unpack_meta(step: StageStep) -> StepMeta:
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
    )


def unpack_wanted(step: StageStep) -> Tensor | None:
    if not step.draws:
        return None
    return torch.from_numpy(np.frombuffer(step.wanted, np.int64).copy())


def unpack_draws(step: StageStep) -> list[Draw]:
    return [
        Draw(draw.params, draw.generated, draw.eos_token_ids, frozenset(draw.prompt_ids))
        for draw in step.draws
    ]


def _pack_draw(draw: Draw, position: int) -> StageDraw:
    """Tokens generated so far go along only where the draw looks at them: they may be many."""
    params, generated = draw.params, tuple(draw.generated)
    penalties = params.presence_penalty or params.frequency_penalty or draw.prompt_ids
    looked_at = penalties or params.grammar
    if not looked_at and len(generated) >= params.min_tokens:
        params, generated = msgspec.structs.replace(params, min_tokens=0), ()
    return StageDraw(
        params=params,
        generated=generated,
        eos_token_ids=tuple(draw.eos_token_ids),
        position=position,
        prompt_ids=tuple(draw.prompt_ids),
    )


def _raw(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _int32(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, np.int32).copy())

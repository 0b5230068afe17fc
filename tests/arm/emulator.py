"""Runs the kernels on an emulated Arm CPU, called from this process as if they were its own.

`Emulator` cross-compiles the library, starts a program that loads it on an emulated CPU, and sends
it calls. `EmulatedKernels` has the functions of `native.library.Kernels`: it reads the tensors of a
call from this process's memory, and writes back the results of the emulated function.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moonpool_engine.engine.native import build
from moonpool_engine.engine.native.library import ATTEND_CALL, MERGE_CALL, ROPE_CALL, STATE_FLOATS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SYSTEM = Path("/usr/aarch64-linux-gnu")
HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "arm"
PANEL, BLOCK, GROUP = 32, 32, 256
FORM_BITS = (4, 4, 4, 4, 5, 5, 5, 6, 8, 8, 8)
# one letter for each form: half, wide, or S: whole with a half per group
FORM_SCALES = "HHWSHHSSHWS"
FORM_MINIMUM = (False, True, True, True, False, True, True, False, False, False, False)
FORM_SUBS = (1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)
STORED_BYTES = (18, 34, 144, 176, 210)  # the bytes of a group of each format that repack knows


def missing_tool() -> str | None:
    """Returns None if Arm code can be compiled and run here, or else one line with what is
    missing."""
    for name in (COMPILER, EMULATOR):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return None if (SYSTEM / "lib" / "libgomp.so.1").exists() else f"{SYSTEM} has no libgomp.so.1"


def built_driver() -> tuple[Path, Path]:
    """Returns the driver and the library. Compiles them unless the last compilation had the same
    sources."""
    library = BUILT / f"aarch64-{build.library_name()}"
    driver = BUILT / "driver"
    BUILT.mkdir(parents=True, exist_ok=True)
    if not library.exists():
        for older in BUILT.glob("aarch64-*"):
            older.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as work:
            built = build.compile_library(COMPILER, build.ARCHITECTURES["aarch64"], Path(work))
            built.replace(library)
    source = HERE / "driver.cpp"
    if not driver.exists() or driver.stat().st_mtime < source.stat().st_mtime:
        command = [
            COMPILER,
            "-O2",
            "-std=c++17",
            "-pthread",
            str(source),
            "-o",
            str(driver),
            "-ldl",
        ]
        subprocess.run(command, check=True)
    return driver, library


@dataclass
class Buffers:
    """Holds memory of this process that a call may read or write, each piece once."""

    pieces: list[tuple[int, int]] = field(default_factory=list)
    pointers: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, address: int, size: int) -> int:
        self.pieces.append((address, size))
        return len(self.pieces) - 1


class Emulator:
    """Runs a process on an emulated CPU. `isa` is the best instruction set that the library finds
    there."""

    def __init__(self, cpu: str) -> None:
        driver, library = built_driver()
        command = [EMULATOR, "-cpu", cpu, "-L", str(SYSTEM), str(driver), str(library)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.isa = self._take(16).rstrip(b"\0").decode()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _take(self, size: int) -> bytes:
        assert self._process.stdout is not None
        got = self._process.stdout.read(size)
        assert len(got) == size, "the emulated program ended: its last words are above"
        return got

    def call(
        self, name: str, arguments: Sequence[tuple[int, int | float]], buffers: Buffers
    ) -> int:
        """`arguments` are pairs of kind and value. Kind 0 is an integer, 1 the number of a buffer,
        2 a float."""
        sent = [struct.pack("<q", len(name)), name.encode(), struct.pack("<q", len(buffers.pieces))]
        for address, size in buffers.pieces:
            sent += [struct.pack("<q", size), ctypes.string_at(address, size)]
        sent.append(struct.pack("<q", len(arguments)))
        for kind, value in arguments:
            sent.append(
                struct.pack("<qfi" if kind == 2 else "<qq", kind, value, *[0] * (kind == 2))
            )
        sent.append(struct.pack("<q", len(buffers.pointers)))
        sent += [struct.pack("<3q", *pointer) for pointer in buffers.pointers]
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(sent))
        self._process.stdin.flush()
        (result,) = struct.unpack("<q", self._take(8))
        for number, (address, size) in enumerate(buffers.pieces):
            got = self._take(size)
            if all(pointer[0] != number for pointer in buffers.pointers):
                ctypes.memmove(address, got, size)
        return int(result)


def _panels(out: int) -> int:
    return -(-out // PANEL)


def _quantized_bytes(form: int, width: int, out: int) -> int:
    blocks, scale = width // BLOCK, {"H": 2, "W": 4, "S": 1}[FORM_SCALES[form]]
    pair = 2 if FORM_MINIMUM[form] else 1
    record = FORM_BITS[form] * PANEL * 4 + FORM_SUBS[form] * PANEL * scale * pair
    head = 2 * PANEL * pair if FORM_SCALES[form] == "S" else 0
    return _panels(out) * (blocks * record + -(-blocks // (GROUP // BLOCK)) * head)


class EmulatedKernels:
    """Implements `Kernels` for one element type and one instruction set.

    Every size follows from the arguments, as in the kernels themselves.
    """

    def __init__(self, emulator: Emulator, dtype: torch.dtype, isa: str) -> None:
        self._emulator, self._isa = emulator, isa
        self._kind = {torch.float32: "f32", torch.bfloat16: "b16"}[dtype]
        self._size = dtype.itemsize

    def _plain(self, name: str, arguments: Sequence[Any], sizes: Sequence[int | None]) -> int:
        """`sizes` has the number of bytes behind each pointer argument, and None for other
        integers."""
        buffers, sent = Buffers(), []
        for value, size in zip(arguments, [*sizes, *[None] * len(arguments)], strict=False):
            if isinstance(value, float):
                sent.append((2, value))
            elif size is None or not value:
                sent.append((0, int(value)))
            else:
                sent.append((1, buffers.add(value, size)))
        return self._emulator.call(name, sent, buffers)

    def _name(self, name: str) -> str:
        return f"moonpool_{name}_{self._kind}_{self._isa}"

    def linear(self, *a: int) -> int:
        rows, width, out = a[4:7]
        weight = _panels(out) * -(-width * self._size // 4) * PANEL * 4
        sizes = rows * width * self._size, weight, _panels(out) * PANEL * 4, rows * out * self._size
        return self._plain(self._name("linear"), a, sizes)

    def linear_int8(self, *a: int) -> int:
        rows, width, out = a[5:8]
        weight = _panels(out) * -(-width // 2) * PANEL * 2
        scales = _panels(out) * -(-width // GROUP) * PANEL * 4
        bias = _panels(out) * PANEL * 4
        sizes = rows * width * self._size, weight, scales, bias, rows * out * self._size
        return self._plain(self._name("linear_int8"), a, sizes)

    def linear_quantized(self, *a: int) -> int:
        form, rows, width, out, stride = a[0], *a[5:9]
        weight, bias = _quantized_bytes(form, width, out), _panels(out) * PANEL * 4
        y = ((rows - 1) * stride + out) * self._size
        sizes = None, rows * width * self._size, weight, bias, y
        return self._plain(self._name("linear_quantized"), a, sizes)

    def repack(self, *a: int) -> int:
        kind, out, groups, panel_bytes = a[0], *a[3:6]
        sizes = None, out * groups * STORED_BYTES[kind], _panels(out) * panel_bytes
        return self._plain("moonpool_repack", a, sizes)

    def rms_norm(self, *a: Any) -> int:
        rows, width = a[3:5]
        each = rows * width * self._size
        return self._plain(self._name("rms_norm"), a, (each, width * 4, each))

    def add_rms_norm(self, *a: Any) -> int:
        rows, width = a[4:6]
        each = rows * width * self._size
        return self._plain(self._name("add_rms_norm"), a, (each, each, width * 4, each))

    def glu(self, *a: Any) -> int:
        each = a[2] * a[3] * self._size
        return self._plain(self._name("glu"), a, (2 * each, each))

    def soft_cap(self, *a: Any) -> int:
        return self._plain(f"moonpool_soft_cap_{self._isa}", a, (a[2] * 4, a[2] * 4))

    def rope_store(self, call: bytes, threads: int) -> int:
        return self._struct("rope_store", call, threads, self._rope_sizes)

    def rope(self, call: bytes, threads: int) -> int:
        return self._struct("rope", call, threads, self._rope_sizes)

    def attend(self, call: bytes, threads: int) -> int:
        return self._struct("attend", call, threads, self._attend_sizes)

    def attend_part(self, call: bytes, threads: int) -> int:
        return self._struct("attend_part", call, threads, self._attend_sizes)

    def merge(self, call: bytes, threads: int) -> int:
        return self._struct("merge", call, threads, self._merge_sizes)

    def _struct(
        self, name: str, call: bytes, threads: int, sizes: Callable[[bytes], list[int]]
    ) -> int:
        buffers = Buffers()
        packed = ctypes.create_string_buffer(call, len(call))
        whole = buffers.add(ctypes.addressof(packed), len(call))
        tail = ATTEND_CALL.size if name == "attend_part" else len(call)
        found, at = sizes(call), 0
        for size in found:
            (address,) = struct.unpack_from("=Q", call, at)
            if address:
                buffers.pointers.append((whole, at, buffers.add(address, size)))
            at += 8
            if at == 8 * 7 and tail != len(call):
                at = tail
        return self._emulator.call(self._name(name), [(1, whole), (0, threads)], buffers)

    def _slices(self, heads: tuple[int, int, int], fp8: int, stride: int, count: int) -> int:
        """Returns the bytes from the layer's slice of block 0 to the end of the layer's slice of
        the last block."""
        sides, kv_heads, head_bytes = heads
        own = sides * kv_heads * head_bytes
        return (count - 1) * stride + (own if fp8 else own * self._size)

    def _rope_sizes(self, call: bytes) -> list[int]:
        *pointers, stride, count, width, sequences, heads, kv, d, half, most, bt, latent, fp8, _ = (
            ROPE_CALL.unpack(call)
        )
        rows = _last_int32(pointers[8], sequences)
        sides = 1 if latent else 2
        blocks = rows * 2 * kv * d * self._size
        if stride:
            blocks = self._slices((sides, kv, d * bt + (bt if fp8 else 0)), fp8, stride, count)
        x, q = (heads + sides * kv) * d * rows * self._size, heads * d * rows * self._size
        angles, tables = most * half * 4, sequences * width * 4
        meta = rows * 4, (sequences + 1) * 4, tables
        return [x, q, blocks, angles, angles, d * 4, d * 4, *meta]

    def _attend_sizes(self, call: bytes) -> list[int]:
        fields = ATTEND_CALL.unpack(call[: ATTEND_CALL.size])
        *pointers, stride, count, width, sequences, heads, kv, d, bt, _, latent, fp8, _, _ = fields
        rows = _last_int32(pointers[4], sequences)
        dv = latent or d
        blocks = self._slices(
            (1 if latent else 2, kv, d * bt + (bt if fp8 else 0)), fp8, stride, count
        )
        q, out = rows * heads * d * self._size, rows * heads * dv * self._size
        meta = rows * 4, (sequences + 1) * 4, sequences * width * 4
        sizes = [q, out, blocks, *meta, heads * 4]
        if len(call) > ATTEND_CALL.size:
            state = rows * heads * (STATE_FLOATS + 2 * dv) * 4
            sizes += [sequences * 4] * 2 + [state] * 2 + [rows * heads * (dv + 2) * 4]
        return sizes

    def _merge_sizes(self, call: bytes) -> list[int]:
        *pointers, rows, heads, d, partials = MERGE_CALL.unpack(call)
        ordered = _last_int32(pointers[2], rows)
        sizes = partials * heads * (d + 2) * 4, ordered * 4, (rows + 1) * 4
        return [*sizes, rows * heads * d * self._size]


def _last_int32(address: int, index: int) -> int:
    return int(ctypes.c_int32.from_address(address + 4 * index).value)

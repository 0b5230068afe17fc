"""Logits of the GPU's operations equal the reference's up to rounding. Logits of moonpool's own
kernels do not depend on chunks and neighbours at all."""

from __future__ import annotations

import random

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import Engine, make_layout
from tests.gpu.backends import BACKENDS, TOLERANCE, Bench, difference, make_ops

DTYPES = ("float32", "bfloat16")
TINY = "random:hidden=96,layers=3,heads=6,kv_heads=2,head_dim=16,inter=112,vocab=300,context=4096"
WIDE = "random:hidden=1024,layers=2,heads=7,kv_heads=1,head_dim=128,inter=2816,vocab=512"
ODD = "random:hidden=160,layers=2,heads=4,kv_heads=4,head_dim=48,inter=208,vocab=300"


def prompt_of(length: int, vocab: int = 300, seed: int = 1) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(vocab) for _ in range(length)]


def reference_logits(name: str, dtype: str, prompt: list[int]) -> torch.Tensor:
    model = open_model(name, dtype)
    layout = make_layout(model, 16)
    blocks = layout.blocks_for(len(prompt))
    engine = Engine(model, ReferenceOps(), empty_cache(layout, blocks))
    step = StepEntry(AttemptId("reference"), prompt, 0, range(blocks), None)
    return engine.logits([step])[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [TINY, WIDE, ODD], ids=["tiny", "wide", "odd"])
def test_logits_are_the_reference_s(backend: str, dtype: str, name: str) -> None:
    ops = make_ops(backend)
    lab = Bench.of(open_model(name, dtype), ops, 2000)
    for length in (1, 17, 64, 130):
        prompt = prompt_of(length)
        expected = reference_logits(name, dtype, prompt)
        assert difference(lab.whole(prompt), expected) < TOLERANCE[dtype], length


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_sees_its_own_context_only(backend: str, dtype: str) -> None:
    """Blocks hold NaN beyond every context, so that a read of the padding would show, because
    lengths differ."""
    ops = make_ops(backend)
    lab = Bench.of(open_model(TINY, dtype), ops, 4000)
    prompts = [prompt_of(n, seed=2) for n in (2, 16, 17, 33, 250)]
    blocks = [lab.take(len(p)) for p in prompts]
    lab.run(*[(p[:-1], 0, b) for p, b in zip(prompts, blocks, strict=True)])
    together = lab.run(*[(p[-1:], len(p) - 1, b) for p, b in zip(prompts, blocks, strict=True)])
    for row, prompt in zip(together, prompts, strict=True):
        assert difference(row, lab.whole(prompt)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(TINY, "float32"), (TINY, "bfloat16"), (WIDE, "bfloat16")],
    ids=["tiny-float32", "tiny-bfloat16", "wide-bfloat16"],
)
def test_own_kernels_give_the_same_bits_in_any_company(name: str, dtype: str) -> None:
    ops = make_ops("triton-cuda")
    lab = Bench.of(open_model(name, dtype), ops, 60_000, block_tokens=64)
    rng = random.Random(7)
    crowd = [prompt_of(rng.randrange(1, 400), seed=3) for _ in range(12)]
    for length in (1, 70, 300, 2500):
        prompt = prompt_of(length)
        alone = lab.whole(prompt)
        assert torch.isfinite(alone).all()
        for chunk in (1 if length < 100 else 600, 64, 257):
            blocks, others = lab.take(length), [(p, 0, lab.take(len(p))) for p in crowd]
            for start in range(0, length, chunk):
                part = (prompt[start : start + chunk], start, blocks)
                company = others if start % (2 * chunk) else []
                logits = lab.run(*company, part)[-1]
            assert torch.equal(logits, alone), (length, chunk)
            lab.free += blocks + [b for _, _, held in others for b in held]


def test_long_contexts_are_split_without_a_trace() -> None:
    """The logits must be equal for a single sequence, which many programs compute in runs of keys,
    and in a large batch, where each sequence has one program."""
    ops = make_ops("triton-cuda")
    lab = Bench.of(open_model(WIDE, "bfloat16"), ops, 1_400_000, block_tokens=64)
    prompt = prompt_of(5000)
    blocks = [lab.take(5001) for _ in range(270)]
    logits = [lab.run((prompt, 0, held))[0] for held in blocks]
    assert all(torch.equal(logits[0], other) for other in logits)
    few = lab.run(*[([7], 5000, held) for held in blocks[:3]])
    alone = lab.run(([7], 5000, blocks[0]))
    crowd = lab.run(*[([7], 5000, held) for held in blocks])
    assert all(torch.equal(alone[0], row) for row in [*crowd, *few])


def test_recorded_decodes_keep_what_they_read() -> None:
    """Runs decodes of several batch sizes and lengths, prefills between them, and the first sizes
    again."""
    ops = make_ops("triton-cuda")
    lab = Bench.of(open_model(TINY, "bfloat16"), ops, 30_000)
    prompts = [prompt_of(n, seed=4) for n in (30, 1100, 5, 2200, 64, 700, 16, 17, 90)]
    blocks = [lab.take(len(p)) for p in prompts]
    expected = [lab.whole(p) for p in prompts]
    lab.run(*[(p[:-1], 0, b) for p, b in zip(prompts, blocks, strict=True)])
    last = [(p[-1:], len(p) - 1, b) for p, b in zip(prompts, blocks, strict=True)]
    for size in (1, 3, 9, 2, 5, 9, 1):
        for first in range(0, len(last) - size + 1, 2):
            logits = lab.run(*last[first : first + size])
            assert all(torch.equal(row, expected[first + i]) for i, row in enumerate(logits)), (
                size,
                first,
            )
            lab.free += lab.take(40)
        lab.whole(prompt_of(50 + size))


def test_products_of_the_library_agree_with_our_own_where_they_are_used() -> None:
    """Uses shapes of real models, with numbers of rows that the choice of kernels did not try."""
    make_ops("triton-cuda")
    from moonpool_engine.engine.cuda.linears import Linears, MixedLinear, TritonLinear

    linears, device = Linears(), torch.device("cuda")
    shapes = [(4096, 6144), (4096, 28672), (14336, 4096), (8192, 1280), (3584, 4608), (896, 1152)]
    for width, outs in shapes:
        weight = torch.randn(outs, width, device=device, dtype=torch.bfloat16) * width**-0.5
        bias = torch.randn(outs, device=device, dtype=torch.bfloat16) if outs == 4608 else None
        chosen = linears.choose(weight, bias)
        assert isinstance(chosen, MixedLinear), (width, outs)
        x = torch.randn(4104, width, device=device, dtype=torch.bfloat16)
        expected = TritonLinear(weight, bias)(x)
        for rows in (1, 3, 15, 31, 65, 129, 500, 514, 600, 900, 1032, 1300, 2047, 3500, 4104):
            assert torch.equal(chosen(x[:rows]), expected[:rows]), (width, outs, rows)
        exact = x[:64].double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        assert difference(expected[:64], exact) < 3e-3

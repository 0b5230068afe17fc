"""A cost model fitted to measurements of a running engine. All times are in seconds.

    prefill(n, p)   = a + b (n-p) + c (n-p)^2 + d (n-p) p     n prompt tokens, p of them cached
    decode(B, ctx)  = e + f B + g ctx                         ctx = sum of the B contexts, in tokens
    mixed           = max(e, chunks) + f' B + g' ctx          chunks and B decodes in one step
    transfer(bytes) = h + bytes / bandwidth
    load(bytes)     = bytes / bandwidth of the SSD

The prefill form fits Mooncake's own testbed within 8 % (FAST'25 Fig. 14). Coefficients are fitted
by non-negative least squares on *relative* errors, so that estimates grow with every argument and
short requests count as much as long ones. The arithmetic is written out, so that every machine and
every Python gives the same bits: LAPACK's results differ, and so does `sum` of floats from Python
3.12 on; `fsum` does not.

As the ground truth of a simulation (`StepCost`) the prefill form telescopes: a chunk costs what it
adds to its prompt's total, with `a` in the first chunk, so every chunking of a prompt costs
prefill(n, p). Prompts that begin in one step share one `a`. A mixed step reads the weights once,
hence the floor e. The mixed form has its own f' and g' if mixed steps were measured: a decode's row
costs time beside a chunk that fills the device, while without a chunk it is hidden by the reading
of the weights. A step without decodes has no such floor, because that would break the sum.

`domain` states what was measured. Outside the domain the formulas continue like a roofline, at the
device's rates. Only in small batches may f be 0: beyond the largest measured batch, a row costs at
least b.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import fsum, inf, sqrt

import msgspec

from moonpool.cost.domain import CostDomain
from moonpool.cost.model import Chunk, StepCost, prompt_s
from moonpool.types import Struct

DecodeSpread = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


class PrefillSample(Struct, frozen=True):
    """A measured prefill of `num_tokens`, of which the first `cached_tokens` were cached."""

    num_tokens: int
    cached_tokens: int
    seconds: float


class DecodeSample(Struct, frozen=True):
    """A measured decode step of `batch` requests whose contexts sum to `context_tokens`."""

    batch: int
    context_tokens: int
    seconds: float


class MixedSample(Struct, frozen=True):
    """A measured step of one chunk and `batch` decodes whose contexts sum to `context_tokens`.
    `chunk_s`: the time of the chunk alone, if it was measured. The time is needed because the
    decodes add only a small difference to it."""

    num_tokens: int
    cached_tokens: int
    batch: int
    context_tokens: int
    seconds: float
    chunk_s: float | None = None


class OffloadParts(Struct, frozen=True):
    """Parts of a decode step with one attention worker, in seconds for all layers together, as
    measured on one machine.

    `model`: the model worker's computing time by batch size; piecewise linear between these points.
    `attention`: (e, f, g), where the worker is busy for e + f batch + g context_tokens.
    `message_s`: the time of a step in addition to these two. `cores`: number of cores that computed
    the step. `seen_workers`, `seen_own_tokens`: number of attention workers of the instance in the
    profile that contains this, and number of KVCache tokens that it kept itself. 0 workers means
    that the instance computed attention itself.
    """

    model: tuple[tuple[int, float], ...]
    attention: tuple[float, float, float]
    message_s: float
    cores: int
    seen_workers: int = 0
    seen_own_tokens: int = 0


class FittedCost(Struct, frozen=True):
    """Coefficients of the formulas above; implements `CostModel` and `StepCost`.

    The fields from `contention` on are measured on a serving machine, for its simulation. The
    values 0, empty and None mean that a quantity was not measured.

    `contention`: factors by which a step with prompts, and a step of decodes alone, takes longer
    while other instances of the machine compute.
    `control_latency_s`: the latency of one message between head and worker.
    `front_s`: the time that HTTP adds to a first token. `token_bytes`: number of KVCache bytes of
    one token. `decode_curve`: (batch, seconds) of decode steps, without the part g ctx. The curve
    replaces e + f B: linear between the points, and f for each request above the last point.
    `decode_spread`: equally likely ratios of the times of single decode steps to the predicted
    time: while no other instance computes, while one does, and where an answer has just begun.
    `offload`: the parts of steps with attention workers. `domain`: the measured range, or None if
    it is not stated.
    """

    prefill: tuple[float, float, float, float]
    decode: tuple[float, float, float]
    transfer_latency_s: float = 0.002
    shared_memory_bytes_per_s: float = 4e9
    network_bytes_per_s: float = 1e9
    ssd_read_bytes_per_s: float = 0.0  # 0 means that there is no SSD tier
    mixed: tuple[float, float] | None = None  # f' and g'; None means that they equal f and g
    tile_tokens: int = 1
    contention: tuple[float, float] = (1.0, 1.0)
    control_latency_s: float = 0.0
    front_s: float = 0.0
    token_bytes: int = 0
    decode_curve: tuple[tuple[int, float], ...] = ()
    decode_spread: DecodeSpread = ((), (), ())
    offload: OffloadParts | None = None
    domain: CostDomain | None = None

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        a, b, c, d = self.prefill
        new = max(num_tokens - cached_tokens, 0)
        return a + new * (b + c * new + d * cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self._decode_base_s(batch) + self.decode[2] * context_tokens

    def _decode_base_s(self, batch: int) -> float:
        """The time of a decode step without its contexts. A row beyond the largest measured batch
        takes at least what a prompt's token does: reading the weights no longer hides it."""
        most = inf if self.domain is None else self.domain.decode_batch[1]
        if batch > most:
            row_s = max(self.decode[1], self.prefill[1])
            return self._decode_base_s(int(most)) + row_s * (batch - most)
        e, f, _ = self.decode
        curve = self.decode_curve
        if not curve:
            return e + f * batch
        before, before_s = curve[0]
        if batch <= before:
            return before_s
        for after, after_s in curve:
            if batch <= after:
                share = (batch - before) / max(after - before, 1)
                return before_s + share * (after_s - before_s)
            before, before_s = after, after_s
        return before_s + f * (batch - before)

    @property
    def num_stages(self) -> int:
        return 1

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        chunks_s = 0.0
        if chunks:
            a, b, c, d = self.prefill
            begins = False
            for chunk in chunks:
                new = chunk.num_tokens
                cached = chunk.cached_tokens
                done = chunk.start - cached
                chunks_s += new * (b + c * (done + done + new) + d * cached)
                begins = begins or done == 0
            if begins:
                chunks_s += a
        if decode_batch == 0:
            return chunks_s
        if not chunks:
            return self.decode_step_s(decode_batch, decode_context_tokens)
        e, f, g = self.decode
        if self.mixed is not None:
            f, g = self.mixed
        floor_s = e if e > chunks_s else chunks_s
        return floor_s + f * decode_batch + g * decode_context_tokens

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        if batch == 0:
            return 0.0
        added = batch * (num_steps * (num_steps - 1) // 2)
        contexts_s = self.decode[2] * (num_steps * context_tokens + added)
        return num_steps * self._decode_base_s(batch) + contexts_s

    def hop_s(self, num_tokens: int) -> float:
        return 0.0

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        if num_bytes <= 0:
            return 0.0
        rate = self.shared_memory_bytes_per_s if same_host else self.network_bytes_per_s
        return self.transfer_latency_s + num_bytes * max(num_sharing, 1) / rate

    def load_s(self, num_bytes: int, num_sharing: int = 1) -> float:
        if num_bytes <= 0:
            return 0.0
        if self.ssd_read_bytes_per_s <= 0.0:
            return inf
        return num_bytes * max(num_sharing, 1) / self.ssd_read_bytes_per_s


class ChunkChoice(Struct, frozen=True):
    """The largest chunk of whole tiles whose step, with these decodes, meets a TBT SLO."""

    tbt_s: float
    decodes: int
    context_tokens: int  # context tokens of each decode
    chunk_tokens: int  # tokens of the chunk, without the decodes
    step_s: float  # predicted
    holds: bool  # False if even the smallest chunk misses the SLO


class Profile(FittedCost, frozen=True):
    """What `moonpool profile` writes: fitted costs, the curve of chunk sizes, and the recommended
    chunks. Such a file is accepted wherever fitted costs are (`hardware.cost`)."""

    step_s_by_tokens: dict[int, float] = msgspec.field(default_factory=dict)  # nothing cached
    saturation_tokens: int = 0  # smallest chunk that has nearly the highest throughput
    chunks: tuple[ChunkChoice, ...] = ()


def fit_cost(
    prefills: Sequence[PrefillSample],
    decodes: Sequence[DecodeSample],
    mixed: Sequence[MixedSample] = (),
    single_steps: bool = False,
) -> FittedCost:
    """Fits all formulas; `mixed` may be empty. Raises ValueError without prefill or decode samples.

    `single_steps`: whether each prefill sample is one chunk, while prompts will have several
    chunks. The quadratic part is attention, which costs the same over tokens of an earlier chunk as
    over cached ones, and half as much over the chunk's own: c = d/2. A separate c would be fitted
    to differences between chunks, and a prompt ten times as long be predicted by its square."""
    if not prefills or not decodes:
        raise ValueError("a cost model needs at least one prefill and one decode measurement")
    prefill_rows = []
    for prefill in prefills:
        cached, new = prefill.cached_tokens, prefill.num_tokens - prefill.cached_tokens
        squares = (0.5 * new * new + new * cached,) if single_steps else (new * new, new * cached)
        prefill_rows.append((1.0, float(new), *map(float, squares)))
    decode_rows = [(1.0, float(s.batch), float(s.context_tokens)) for s in decodes]
    prefills_s = [s.seconds for s in prefills]
    a, b, *quadratic = _fit_non_negative(prefill_rows, prefills_s)
    if single_steps and not b:
        # Noise made the longer chunk too slow. Every token has a part of its own besides attention,
        # and a square taken from short chunks would let a long one last for minutes.
        a, b = _fit_non_negative([row[:2] for row in prefill_rows], prefills_s)
        quadratic = [0.0] * len(quadratic)
        if not b:
            a, b = _token_s(a, prefills, decodes)
    c, d = (0.5 * quadratic[0], quadratic[0]) if single_steps else quadratic
    e, f, g = _fit_non_negative(decode_rows, [s.seconds for s in decodes])
    apart = FittedCost(prefill=(a, b, c, d), decode=(e, f, g), domain=_domain_of(prefills, decodes))
    return msgspec.structs.replace(apart, mixed=_fit_mixed(apart, mixed))


def _token_s(
    fixed_s: float, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
) -> tuple[float, float]:
    """Splits a prefill's time into a fixed part and a part per token, if the fit found only a fixed
    part.

    Such times were distorted by other work on the machine, so that short steps took as long as long
    ones. Without the split, the computation of a prefix would seem free, so no prefix would be
    loaded. The decode of one request is a step of one token, so the fixed part is at most the
    fastest of these decodes."""
    alone_s = min((s.seconds for s in decodes if s.batch == 1), default=fixed_s)
    most = max(s.num_tokens - s.cached_tokens for s in prefills)
    longest = [s.seconds for s in prefills if s.num_tokens - s.cached_tokens == most]
    rest_s = min(longest) - alone_s
    return (alone_s, rest_s / most) if alone_s < fixed_s and rest_s > 0 else (fixed_s, 0.0)


def _domain_of(prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> CostDomain:
    lengths = [sample.num_tokens for sample in prefills]
    batches = [sample.batch for sample in decodes]
    contexts = [sample.context_tokens for sample in decodes]
    return CostDomain(
        prompt_tokens=(min(lengths), max(lengths)),
        cached_share=max(sample.cached_tokens / sample.num_tokens for sample in prefills),
        decode_batch=(min(batches), max(batches)),
        context_tokens=(min(contexts), max(contexts)),
    )


def _fit_mixed(apart: FittedCost, samples: Sequence[MixedSample]) -> tuple[float, float] | None:
    """Returns f' and g', which decodes add to a chunk's time, or None if no sample shows that they
    add any: the model then takes f and g."""
    rows, added_s = [], []
    for sample in samples:
        chunk_s = sample.chunk_s
        if chunk_s is None:
            chunk_s = apart.prefill_s(sample.num_tokens, sample.cached_tokens)
        seconds = sample.seconds - max(chunk_s, apart.decode[0])
        if seconds > 0:
            rows.append((float(sample.batch), float(sample.context_tokens)))
            added_s.append(seconds)
    if not rows:
        return None
    f, g = _fit_non_negative(rows, added_s)
    return f, g


def _fit_non_negative(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors with coefficients >= 0. `rows` has a tuple of terms for each
    sample. With at most four terms, all subsets of the terms are tried."""
    num_terms = len(rows[0])
    columns, magnitudes = [], []
    for term in range(num_terms):
        relative = [row[term] / time for row, time in zip(rows, seconds, strict=True)]
        magnitudes.append(max(relative) or 1.0)
        columns.append([value / magnitudes[-1] for value in relative])
    best_error, best = float("inf"), [0.0] * num_terms
    for size in range(1, num_terms + 1):
        for subset in combinations(range(num_terms), size):
            solved = _least_squares([columns[term] for term in subset])
            if solved is None or min(solved[0]) < 0:
                continue
            solution, error = solved
            if error < best_error - 1e-12:
                best_error, best = error, [0.0] * num_terms
                for term, coefficient in zip(subset, solution, strict=True):
                    best[term] = coefficient
    return [value / magnitude for value, magnitude in zip(best, magnitudes, strict=True)]


def _least_squares(columns: Sequence[list[float]]) -> tuple[list[float], float] | None:
    """Solves `columns` x = 1 by modified Gram-Schmidt. Returns the coefficients and the squared
    error, or None if the columns are linearly dependent."""
    basis: list[list[float]] = []
    upper: list[list[float]] = []  # column j of R: the products with basis 0..j
    target: list[float] = []
    rest = [1.0] * len(columns[0])
    for column in columns:
        products = []
        left = column
        for direction in basis:
            products.append(_dot(direction, left))
            left = [x - products[-1] * y for x, y in zip(left, direction, strict=True)]
        norm = sqrt(_dot(left, left))
        if norm <= 1e-9 * sqrt(_dot(column, column)):
            return None
        basis.append([x / norm for x in left])
        upper.append([*products, norm])
        target.append(_dot(basis[-1], rest))
        rest = [x - target[-1] * y for x, y in zip(rest, basis[-1], strict=True)]
    solution = [0.0] * len(columns)
    for i in reversed(range(len(columns))):
        known = fsum(upper[j][i] * solution[j] for j in range(i + 1, len(columns)))
        solution[i] = (target[i] - known) / upper[i][i]
    return solution, _dot(rest, rest)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return fsum(x * y for x, y in zip(a, b, strict=True))


CACHED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHORTEST_TOKENS = 128
MIXED_CONTEXTS = (512, 4096)  # tokens of each decode in a mixed step


def fit_to_ground_truth(
    ground_truth: StepCost,
    chunk_tokens: int,
    max_tokens: int,
    transfer_latency_s: float,
    shared_memory_bytes_per_s: float,
    network_bytes_per_s: float,
    tile_tokens: int = 1,
) -> FittedCost:
    """Fits `FittedCost` to the times of prompts of up to `max_tokens` in chunks of `chunk_tokens`.

    In a pipeline, a prompt counts with the time for which it occupies one stage, not with its
    latency, because queues are sums of these times and the pipeline fills only once. A decode step
    counts with the time between two tokens: all stages, each with an even share of the batch.
    """
    fitted = fit_cost(
        _prefill_samples(ground_truth, chunk_tokens, max_tokens),
        _decode_samples(ground_truth, max_tokens),
        _mixed_samples(ground_truth, chunk_tokens),
    )
    return msgspec.structs.replace(
        fitted,
        transfer_latency_s=transfer_latency_s,
        shared_memory_bytes_per_s=shared_memory_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        tile_tokens=tile_tokens,
    )


def pipelined(whole: FittedCost, num_stages: int) -> FittedCost:
    """Returns the cost of an instance with `num_stages` equal stages, from `whole`, the cost of one
    step through all stages; counted as in `fit_to_ground_truth`."""
    if num_stages == 1:
        return whole
    a, b, c, d = (x / num_stages for x in whole.prefill)
    e, f, g = whole.decode
    mixed = whole.mixed or (f, g)  # the coefficients for one stage's share of the decodes
    domain = whole.domain and whole.domain.of_stages(num_stages)
    return msgspec.structs.replace(
        whole,
        prefill=(a, b, c, d),
        decode=(e, f / num_stages, g / num_stages),
        mixed=mixed,
        decode_curve=tuple((batch * num_stages, x) for batch, x in whole.decode_curve),
        domain=domain,
    )


def scaled(
    cost: FittedCost, prefill_factor: float, decode_factor: float, transfer_factor: float = 1.0
) -> FittedCost:
    """Returns `cost` with its times multiplied: by factors learned online, or to make it wrong on
    purpose in a simulation. The times of the SSD stay. Raises ValueError unless all factors are
    above 0."""
    if min(prefill_factor, decode_factor, transfer_factor) <= 0:
        raise ValueError("cost factors must be above 0")
    a, b, c, d = (x * prefill_factor for x in cost.prefill)
    e, f, g = (x * decode_factor for x in cost.decode)
    mixed = cost.mixed
    if mixed is not None:
        mixed = mixed[0] * decode_factor, mixed[1] * decode_factor
    return msgspec.structs.replace(
        cost,
        prefill=(a, b, c, d),
        decode=(e, f, g),
        transfer_latency_s=cost.transfer_latency_s * transfer_factor,
        shared_memory_bytes_per_s=cost.shared_memory_bytes_per_s / transfer_factor,
        network_bytes_per_s=cost.network_bytes_per_s / transfer_factor,
        mixed=mixed,
        decode_curve=tuple((batch, x * decode_factor) for batch, x in cost.decode_curve),
    )


def _prefill_samples(
    ground_truth: StepCost, chunk_tokens: int, max_tokens: int
) -> list[PrefillSample]:
    samples = []
    for num_tokens in _lengths(max_tokens):
        for share in CACHED_SHARES:
            cached = min(int(num_tokens * share), num_tokens - 1)
            seconds = prompt_s(ground_truth, num_tokens, cached, chunk_tokens)
            samples.append(
                PrefillSample(num_tokens=num_tokens, cached_tokens=cached, seconds=seconds)
            )
    return samples


def _decode_samples(ground_truth: StepCost, max_tokens: int) -> list[DecodeSample]:
    stages = ground_truth.num_stages

    def seconds(batch: int, context: int) -> float:
        if stages == 1:
            return ground_truth.step_s((), batch, batch * context)
        share = -(-batch // stages)
        return stages * (
            ground_truth.step_s((), share, share * context) + ground_truth.hop_s(share)
        )

    return [
        DecodeSample(batch=batch, context_tokens=batch * context, seconds=seconds(batch, context))
        for batch in BATCHES
        for context in _lengths(max_tokens)
    ]


def _mixed_samples(ground_truth: StepCost, chunk_tokens: int) -> list[MixedSample]:
    """Decode-maximal batches: the chunk leaves room for the decodes in the token budget."""
    samples = []
    for batch in (b for b in BATCHES if b <= chunk_tokens // 2):
        new = chunk_tokens - batch
        chunk = Chunk(num_tokens=new, start=0, cached_tokens=0, last=False)
        for context in MIXED_CONTEXTS:
            seconds = ground_truth.step_s((chunk,), batch, batch * context)
            if ground_truth.num_stages > 1:  # the decodes add their time in each stage
                added_s = seconds - ground_truth.step_s((chunk,), 0, 0)
                seconds += (ground_truth.num_stages - 1) * added_s
            samples.append(
                MixedSample(
                    num_tokens=new,
                    cached_tokens=0,
                    batch=batch,
                    context_tokens=batch * context,
                    seconds=seconds,
                )
            )
    return samples


def _lengths(max_tokens: int) -> list[int]:
    """Lengths that double up to `max_tokens`."""
    lengths = [max_tokens]
    while lengths[-1] >= 2 * SHORTEST_TOKENS:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]

"""Lamina's first claim, 1.48 to 12.1 times the tokens per dollar of devices of one kind.

It is checked by rooflines with one set of prices, against the smallest and the best number of such
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from moonpool.config.tables import ConfigError
from moonpool.cost.model import StepCost
from moonpool.sim.hardware.node_cost import MEMORY_SHARE, kv_capacity_tokens
from moonpool.sim.hardware.offload_cost import AttentionPool, OffloadCost, OffloadNetwork
from papers.constants import device_of, roofline, shape_of
from papers.finding import Check, Finding, FindingRow
from papers.lamina.runs import NUM_BATCHES, USD_PER_H
from papers.options import Options
from papers.plot import Panel, bars

LEAST, LARGEST = 1.48, 12.1
COMPUTE = ("A100-SXM", "H100-SXM")
MEMORY = ("A10", "L40S", "H20")
MODELS = {"33B": "llama-33b", "65B": "llama-65b", "LLaMA3-70B": "llama3-70b"}
CONTEXTS = (1024, 4096, 16_384)
COUNTS = (1, 2, 4, 8)
POOL_COUNTS = (1, 2, 4, 8, 16)
MOST_REQUESTS = 1024
Prices = Mapping[str, float]
NOTES = (
    (
        "The claim stands in the abstract of the paper's first version, of which neither devices "
        "nor prices are at hand; so both are chosen here, and nothing is fitted to the claim."
    ),
    (
        "The claim's range follows against the fewest devices that hold a model: what the weights "
        "leave of them holds a request or two, and each token pays for reading all weights. More "
        "of the same devices do better per dollar too. Over their best number, which is the "
        "baseline a buyer has, the range does not follow."
    ),
    (
        "Whether offloading pays hangs on the price of memory devices. By Lamina's Table 1 an H20 "
        "costs 0.42 of an H100; by the catalogue's cloud prices an H100 costs less than an H20."
    ),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens per second, and devices by name."""

    tokens_per_s: float
    devices: tuple[tuple[str, int], ...]

    def per_usd(self, prices: Prices) -> float:
        """Tokens per dollar."""
        return self.tokens_per_s * 3600 / sum(n * prices[name] for name, n in self.devices)

    @property
    def words(self) -> str:
        return " + ".join(f"{n} {name}" for name, n in self.devices)


@dataclass(frozen=True, slots=True)
class DollarCell:
    """One model and context on one kind of compute device, under one set of prices."""

    name: str
    offloaded: Offer
    fewest: Offer
    best: Offer
    best_of_any: Offer
    prices: Prices

    def over(self, other: Offer) -> float:
        return self.offloaded.per_usd(self.prices) / other.per_usd(self.prices)


FEWEST = "the fewest devices of one kind"
BASELINES: dict[str, Callable[[DollarCell], Offer]] = {
    FEWEST: lambda cell: cell.fewest,
    "the best number of them": lambda cell: cell.best,
    "the best of any one kind": lambda cell: cell.best_of_any,
}


def run(options: Options) -> Finding:
    options.progress("rooflines")
    prices = catalogue_prices()
    cells = dollar_cells(COMPUTE, MEMORY, prices)
    printed = dollar_cells(("H100-SXM",), ("H20",), USD_PER_H)
    return Finding(
        name="lamina-dollars",
        title="Tokens per dollar of attention offloading",
        source="Lamina, arXiv 2405.01814v1, abstract; prices of v2, Table 1",
        paper_inputs=(f"the claim alone: {LEAST} to {LARGEST} times, estimated",),
        chosen_inputs=(
            (
                "prices: those of v2's Table 1, as in all figures of Lamina here: "
                + ", ".join(f"{name} ${usd:g}/h" for name, usd in USD_PER_H.items())
            ),
            (
                "and beside them, without a verdict, the catalogue's: "
                + ", ".join(f"{name} ${usd:g}/h" for name, usd in prices.items())
            ),
            (
                "weights on H100, KVCache on 1 to 16 H20; by the catalogue's prices weights on "
                f"{' or '.join(COMPUTE)} and KVCache on {', '.join(MEMORY)}; of all numbers the "
                "best per dollar; contexts of 1k, 4k and 16k"
            ),
            (
                f"full batches of at most {MOST_REQUESTS} requests; decode alone, as in v2; "
                f"{MEMORY_SHARE:.0%} of the memory is usable; {NUM_BATCHES} staggered batches"
            ),
        ),
        rows=(
            *_rows(printed, "Table 1's prices", True),
            *_rows(cells, "the catalogue's prices", False),
            *_break_even_rows(printed),
        ),
        checks=_checks(cells, printed),
        notes=NOTES,
        panels=(_panel(printed),),
    )


def catalogue_prices() -> dict[str, float]:
    found = {}
    for name in (*COMPUTE, *MEMORY):
        price = device_of(name).price
        assert price is not None, f"{name} has no price"
        found[name] = price.usd_per_h
    return found


def dollar_cells(compute: Sequence[str], memory: Sequence[str], prices: Prices) -> list[DollarCell]:
    return [
        _cell(device, model, context, memory, prices)
        for device in compute
        for model in MODELS
        for context in CONTEXTS
        if alone(device, model, context)
    ]


def _cell(
    device: str, model: str, context: int, memory: Sequence[str], prices: Prices
) -> DollarCell:
    def value(offer: Offer) -> float:
        return offer.per_usd(prices)

    same = alone(device, model, context)
    every = [offer for name in (device, *memory) for offer in alone(name, model, context)]
    pairs = [offer for name in memory for offer in offloaded(device, name, model, context)]
    return DollarCell(
        name=f"{model}, {context // 1024}k, {device}",
        offloaded=max(pairs, key=value),
        fewest=same[0],
        best=max(same, key=value),
        best_of_any=max(every, key=value),
        prices=prices,
    )


@cache
def alone(device: str, model: str, context: int) -> tuple[Offer, ...]:
    """Returns offers of rising numbers of devices of one kind, from the smallest that holds the
    model and a request."""
    found = []
    for count in COUNTS:
        try:
            capacity = kv_capacity_tokens(device_of(device), shape_of(MODELS[model]), count)
            cost = roofline(device, MODELS[model], count)
        except (ConfigError, ValueError):
            continue  # too little memory, or no all-reduce figures
        if capacity >= context:
            found.append(Offer(_tokens_per_s(cost, capacity, context), ((device, count),)))
    return tuple(found)


@cache
def offloaded(device: str, memory: str, model: str, context: int) -> tuple[Offer, ...]:
    """Returns offers of the smallest number of devices that hold the weights, with each number of
    attention devices."""
    shape = shape_of(MODELS[model])
    count = next(n for n in COUNTS if holds_weights(device, model, n))
    weights = roofline(device, shape.name, count)
    found = []
    for number in POOL_COUNTS:
        pool = AttentionPool(device_of(memory), number)
        capacity = pool.capacity_tokens(shape, MEMORY_SHARE)
        if capacity >= context:
            wire = OffloadNetwork.of(device_of(device), count, pool)
            cost = OffloadCost(weights, pool, wire, NUM_BATCHES)
            tokens_per_s = _tokens_per_s(cost, capacity, context)
            found.append(Offer(tokens_per_s, ((device, count), (memory, number))))
    return tuple(found)


def holds_weights(device: str, model: str, count: int) -> bool:
    usable = MEMORY_SHARE * count * device_of(device).memory_bytes
    return usable > shape_of(MODELS[model]).weight_bytes


def _tokens_per_s(cost: StepCost, capacity_tokens: int, context: int) -> float:
    batch = min(capacity_tokens // context, MOST_REQUESTS)
    return batch / cost.step_s((), batch, batch * context)


def _rows(cells: Sequence[DollarCell], prices: str, claimed: bool) -> list[FindingRow]:
    """Returns the least and the largest gain. The claim is compared with the gain over the smallest
    number of devices."""
    rows = []
    for words, pick in BASELINES.items():
        ranked = sorted(cells, key=lambda cell: cell.over(pick(cell)))
        for end, paper, cell in (("least", LEAST, ranked[0]), ("largest", LARGEST, ranked[-1])):
            claim = paper if claimed and words == FEWEST else None
            note = f"{cell.name}: {cell.offloaded.words} over {pick(cell).words}"
            label = f"{prices}: {end} gain over {words}"
            rows.append(FindingRow(label, "x", claim, cell.over(pick(cell)), note))
    return rows


def _break_even_rows(cells: Sequence[DollarCell]) -> list[FindingRow]:
    """Returns the prices of an attention device at which both ends of the claim would hold against
    the best number of devices."""
    rows = []
    for cell in cells:
        if not cell.name.startswith("LLaMA3-70B, 4k") and not cell.name.startswith("33B, 4k"):
            continue
        (device, count), (memory, number) = cell.offloaded.devices
        for gain in (LEAST, LARGEST):
            allowed = cell.offloaded.tokens_per_s * 3600 / (gain * cell.best.per_usd(cell.prices))
            usd = (allowed - count * cell.prices[device]) / number
            label = f"{cell.name}: {gain:g} x the best number of {device} if a {memory} cost"
            note = "" if usd > 0 else "below 0: at no price"
            rows.append(FindingRow(label, "$/h", None, usd, note))
    return rows


def _checks(cells: Sequence[DollarCell], printed: Sequence[DollarCell]) -> tuple[Check, ...]:
    return tuple(
        Check(
            f"at {prices}, more per dollar than {words} in every cell",
            all(cell.over(pick(cell)) > 1 for cell in some),
        )
        for prices, some in (("Table 1's prices", printed), ("the catalogue's", cells))
        for words, pick in BASELINES.items()
    )


def _panel(cells: Sequence[DollarCell]) -> Panel:
    return Panel(
        "Tokens per dollar over devices of one kind",
        "",
        "x",
        (
            bars("the fewest", "ours", {cell.name: cell.over(cell.fewest) for cell in cells}),
            bars("the best number", "ours", {cell.name: cell.over(cell.best) for cell in cells}),
            bars("any kind", "ours", {cell.name: cell.over(cell.best_of_any) for cell in cells}),
        ),
        log_y=True,
    )

"""What is booked on the instances, as arrays over their rows: what a placement reads at once.

Each sum is kept up to date by the event that changes it, in constant time, and never added up from
the requests again (`Conductor.validate` does that, to compare). Sums are whole numbers, seconds
among them as nanoseconds: adding and taking away leaves no rounding behind. They are kept as
float64, exact up to 2**53, so that no prediction has to convert an array. Nothing here decides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.cost.fitted import FittedCost
from moonpool.types import InstanceId, Slo
from moonpool.workers.messages import InstanceInfo

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NEVER_S = float("-inf")
S_PER_NS = 1e-9
LEAST_STEP_S = 1e-12

_BOOKED = (
    "waiting_ns",
    "room_tokens",
    "booked_batch",
    "booked_context",
    "decoding_batch",
    "decoding_context",
    "num_serving",
)
_KNOWN = ("capacity_tokens", "engine_tokens", "chunk_tokens", "host")
_COEFFICIENTS = (
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "latency_s",
    "s_per_shm_byte",
    "s_per_net_byte",
    "s_per_ssd_byte",
)
_INSTANTS = ("busy_until_s", "last_placed_s")
_ROLES = ("prefills", "decodes")


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Fleet:
    """Arrays by row; a row without an instance neither prefills nor decodes."""

    waiting_ns: Floats  # predicted prefill time of what is booked and has not started
    room_tokens: Floats  # of KVCache, not booked
    booked_batch: Floats  # answers booked here, those still in prefill elsewhere included
    booked_context: Floats
    decoding_batch: Floats  # answers that give tokens now
    decoding_context: Floats
    num_serving: Floats  # fetches by others
    capacity_tokens: Floats  # of the whole pool
    engine_tokens: Floats  # of them, in the engine's own memory at once
    chunk_tokens: Floats  # of prompts, in one step
    host: Floats  # equal numbers share memory; 0: unknown
    a: Floats  # prefill and decode coefficients of `FittedCost`, by its own letters
    b: Floats
    c: Floats
    d: Floats
    e: Floats
    f: Floats
    g: Floats
    latency_s: Floats
    s_per_shm_byte: Floats
    s_per_net_byte: Floats
    s_per_ssd_byte: Floats  # to read it; without an SSD, more than anybody waits
    busy_until_s: Floats  # when the prefills that have started should be over
    last_placed_s: Floats
    prefills: Bools
    decodes: Bools

    def __init__(self) -> None:
        for name in (*_BOOKED, *_KNOWN, *_COEFFICIENTS, *_INSTANTS):
            setattr(self, name, np.zeros(0))
        for name in _ROLES:
            setattr(self, name, np.zeros(0, dtype=np.bool_))
        self.ids: list[InstanceId] = []
        self.least_capacity_tokens = 0.0
        self.infinite: Floats = np.zeros(0)  # a template to copy
        self.num_prefills = self.num_decodes = self.most_decode_tokens = 0
        self.total_decoding = self.total_decoding_context = 0
        self.mixed: Bools | None = None  # instances of both kinds; None: there are none
        self.tbt_tail = 1.0  # the longest tenth of an answer's gaps, over its mean gap
        self.ttft_tail = 1.0  # what nine in ten first tokens took at most, over what was predicted
        self.decodes_alike = True  # all decode instances are believed to take the same times
        self.num_on_host: dict[float, int] = {}
        self._hosts: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self.prefills)

    def join(self, row: int, info: InstanceInfo) -> None:
        """An instance with nothing booked takes a row."""
        while len(self) <= row:
            self._add_row()
        self.ids[row] = info.instance_id
        assert not self.prefills[row] and not self.decodes[row]
        self._clear(row)
        self.believe(row, info.cost)
        self.prefills[row], self.decodes[row] = info.role.prefills, info.role.decodes
        capacity = info.num_blocks * info.layout.block_tokens
        self.capacity_tokens[row] = self.room_tokens[row] = capacity
        # Without a limit of its own, an engine takes what the pool takes, and that is booked.
        self.engine_tokens[row] = info.engine_tokens or np.inf
        self.chunk_tokens[row] = info.chunk_tokens
        host = self._hosts.setdefault(info.address.host_id, len(self._hosts))
        self.host[row] = host
        self.num_on_host[host] = self.num_on_host.get(host, 0) + 1
        self._count_roles()

    def believe(self, row: int, cost: FittedCost) -> None:
        """What the instance's work takes, from now on."""
        self.a[row], self.b[row], self.c[row], self.d[row] = cost.prefill
        self.e[row], self.f[row], self.g[row] = cost.decode
        self.latency_s[row] = cost.transfer_latency_s
        self.s_per_shm_byte[row] = 1.0 / cost.shared_memory_bytes_per_s
        self.s_per_net_byte[row] = 1.0 / cost.network_bytes_per_s
        self.s_per_ssd_byte[row] = 1.0 / (cost.ssd_read_bytes_per_s or 1.0)
        self._compare_decodes()

    def leave(self, row: int) -> None:
        """Whatever is still booked there goes with it."""
        self.total_decoding -= int(self.decoding_batch[row])
        self.total_decoding_context -= int(self.decoding_context[row])
        self.prefills[row] = self.decodes[row] = False
        self.num_on_host[self.host.item(row)] -= 1
        self.host[row] = 0
        self._clear(row)
        self._count_roles()

    def set_role(self, row: int, prefills: bool, decodes: bool) -> None:
        """What it is booked for from now on; what is booked there already stays."""
        self.prefills[row], self.decodes[row] = prefills, decodes
        self._count_roles()

    # Bookings

    def begin_decoding(self, row: int, context_tokens: int) -> None:
        self.decoding_batch[row] += 1
        self.decoding_context[row] += context_tokens
        self.total_decoding += 1
        self.total_decoding_context += context_tokens

    def end_decoding(self, row: int, context_tokens: int) -> None:
        self.decoding_batch[row] -= 1
        self.decoding_context[row] -= context_tokens
        self.total_decoding -= 1
        self.total_decoding_context -= context_tokens

    def book_decode(self, row: int, context_tokens: int, num: int = 1) -> None:
        """`num` -1 books one off."""
        self.booked_batch[row] += num
        self.booked_context[row] += num * context_tokens

    def grow(self, row: int, num_tokens: int, extra_room_tokens: int) -> None:
        """Answers that are decoded here have got so many tokens longer, some than was booked."""
        self.booked_context[row] += num_tokens
        self.decoding_context[row] += num_tokens
        self.total_decoding_context += num_tokens
        if extra_room_tokens:
            self.room_tokens[row] -= extra_room_tokens

    # Predictions, for all rows

    def queue_s(self, now: float) -> Floats:
        """Estimated time until a new prefill starts."""
        queue_s: Floats = np.maximum(self.busy_until_s - now, 0.0)
        queue_s += self.waiting_ns * S_PER_NS
        return queue_s

    def prefill_s(self, num_tokens: int, cached_tokens: Floats) -> Floats:
        """Time to prefill a prompt of which each row has so much cached."""
        new = num_tokens - cached_tokens
        seconds: Floats = self.a + new * (self.b + self.c * new + self.d * cached_tokens)
        return seconds

    def booked_tbt_s(self, context_tokens: int) -> Floats:
        """Time of a step with all answers booked there and one more of so many tokens."""
        seconds: Floats = (
            self.e
            + self.f * (self.booked_batch + 1.0)
            + self.g * (self.booked_context + float(context_tokens))
        )
        return seconds

    def tbt_s(self, row: int, batch: float, context_tokens: float) -> float:
        """Time of a step on this row's kind of instance."""
        return self.e.item(row) + self.f.item(row) * batch + self.g.item(row) * context_tokens

    def tbt_tail_of(self, row: int) -> float:
        """`tbt_tail`, where it says something: where prompts are computed, too, the longest gaps
        follow from their chunks."""
        mixed = self.mixed is not None and self.mixed.item(row)
        return 1.0 if mixed else self.tbt_tail

    def level_tbt_s(self, batch: float, context_tokens: float) -> float:
        """Time of a step with so many answers, spread so that it is the same on all decode
        instances: the slower take fewer, and none those whose bare step takes longer."""
        e, f, g = self.e[self.decodes], self.f[self.decodes], self.g[self.decodes]
        each_s = np.maximum(f + g * (context_tokens / max(batch, 1.0)), LEAST_STEP_S)
        order = np.argsort(e, kind="stable")
        rates = 1.0 / each_s[order]
        # With the first 1, 2, ... of them; a sum in one order is the same on every machine.
        levels_s = (batch + np.cumsum(e[order] * rates)) / np.cumsum(rates)
        next_s = np.append(e[order][1:], np.inf)
        return float(levels_s[int(np.argmax(levels_s <= next_s))])

    # Load: predicted over promised latency

    def prefill_load(self, slo: Slo, now: float) -> float:
        """Mean over prefill instances of what a request would wait there."""
        if not self.num_prefills:
            return 0.0
        waits_ns = np.rint(self.queue_s(now)[self.prefills] * 1e9).astype(np.int64)
        return int(waits_ns.sum()) / self.num_prefills * S_PER_NS / slo.ttft_s

    def decode_load(self, slo: Slo) -> float:
        """Mean over decode instances of the step they take now, or of the share of the engine's
        memory that is taken, whichever is nearer to its limit; the idle ones have none."""
        if not self.num_decodes:
            return 0.0
        loads = self._loads(slo, self.decoding_batch, self.decoding_context)
        loads[self.decoding_batch == 0] = 0.0
        return self._mean_of_decodes(loads)

    def spread_decode_load(self, slo: Slo, count: float, context_tokens: float) -> float:
        """The same for so many answers spread evenly."""
        if not self.num_decodes or not count:
            return 0.0
        num = self.num_decodes
        return self._mean_of_decodes(self._loads(slo, count / num, context_tokens / num))

    def _loads(self, slo: Slo, batch: Floats | float, context_tokens: Floats | float) -> Floats:
        steps_s = self.e + self.f * batch + self.g * context_tokens
        memory = context_tokens / np.maximum(self.engine_tokens, 1.0)
        loads: Floats = np.maximum(steps_s / slo.tbt_s, memory)
        return loads

    def _mean_of_decodes(self, loads: Floats) -> float:
        # A sum of whole numbers has no order that could differ between machines.
        billionths = np.rint(loads[self.decodes] * 1e9).astype(np.int64)
        return int(billionths.sum()) / self.num_decodes * 1e-9

    def _add_row(self) -> None:
        for name in (*_BOOKED, *_KNOWN, *_COEFFICIENTS, *_INSTANTS, *_ROLES):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(1, dtype=old.dtype)]))
        self.ids.append(InstanceId(""))

    def _clear(self, row: int) -> None:
        for name in _BOOKED:
            getattr(self, name)[row] = 0
        for name in _INSTANTS:
            getattr(self, name)[row] = NEVER_S

    def _compare_decodes(self) -> None:
        rows = self.decodes
        self.decodes_alike = all(
            bool((values == values[:1]).all())
            for values in (self.e[rows], self.f[rows], self.g[rows])
        )

    def _count_roles(self) -> None:
        self.num_prefills = int(np.count_nonzero(self.prefills))
        self.num_decodes = int(np.count_nonzero(self.decodes))
        self._compare_decodes()
        both = self.prefills & self.decodes
        self.mixed = both if both.any() else None
        self.most_decode_tokens = int(self.capacity_tokens[self.decodes].max(initial=0))
        self.least_capacity_tokens = float(self.capacity_tokens[self.prefills].min(initial=np.inf))
        self.infinite = np.full(len(self), np.inf)

"""The instances and the load booked on them, as arrays with one row per instance.

A placement policy reads all instances at once from these arrays. Each event updates the sums that
it changes, in constant time; `Conductor.validate` recomputes them from the requests to compare.
Sums are whole numbers (durations are in nanoseconds), so that additions and subtractions leave no
rounding error. The numbers are stored as float64, exact up to 2**53, so that no prediction has to
convert an array. The table makes no decision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import CHUNKED_STEP_SHARE, LEAST_CHUNK_TOKENS, SHARED_CHUNK_TOKENS
from moonpool.protocol.messages import InstanceInfo
from moonpool.types import InstanceId, Slo

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

NEVER_S = float("-inf")
S_PER_NS = 1e-9
LEAST_STEP_S = 1e-12


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


class InstanceTable:
    """All arrays are indexed by row. A row without an instance neither prefills nor decodes."""

    def __init__(self, tbt_slo_s: float = float("inf"), sizes_chunks: bool = True) -> None:
        """`sizes_chunks`: whether instances size chunks of prompts by `tbt_slo_s`."""
        self.tbt_slo_s = tbt_slo_s
        self._sizes_chunks = sizes_chunks
        self.ids: list[InstanceId] = []
        self.prefills: Bools = np.zeros(0, dtype=np.bool_)  # whether new prefills are accepted
        self.decodes: Bools = np.zeros(0, dtype=np.bool_)  # whether new decodes are accepted

        # Booked load.
        # predicted time of prefills that are booked and not started
        self.waiting_ns: Floats = np.zeros(0)
        self.busy_until_s: Floats = np.zeros(0)  # time at which started prefills should have ended
        self.last_placed_s: Floats = np.zeros(0)  # time of the last placement; NEVER_S before one
        self.room_tokens: Floats = np.zeros(0)  # tokens of KVCache that are not booked
        # number of booked decodes, including requests that are still in prefill
        self.booked_batch: Floats = np.zeros(0)
        self.booked_context: Floats = np.zeros(0)  # tokens of context of all booked decodes
        self.decoding_batch: Floats = np.zeros(0)  # number of requests that produce tokens now
        self.decoding_context: Floats = np.zeros(0)
        self.num_serving: Floats = np.zeros(0)  # prefix fetches by other instances
        # number of prompts that are computed in chunks beside decodes (`inline_chunks`)
        self.num_chunked: Floats = np.zeros(0)

        # Properties of the instance.
        self.capacity_tokens: Floats = np.zeros(0)  # KVCache tokens of the whole pool
        self.context_tokens: Floats = np.zeros(0)  # most tokens of one prompt and its answer
        self.engine_tokens: Floats = np.zeros(0)  # KVCache tokens in the engine's memory, or inf
        self.chunk_tokens: Floats = np.zeros(0)  # most prompt tokens in one step
        self.host: Floats = np.zeros(0)  # equal numbers share a host's memory; 0 means unknown

        # Cost coefficients, see `FittedCost`: n new and p cached tokens of a prompt, B decodes.
        self.prefill_base_s: Floats = np.zeros(0)
        self.prefill_s_per_token: Floats = np.zeros(0)  # times n
        self.prefill_s_per_token_squared: Floats = np.zeros(0)  # coefficient of n * n
        self.prefill_s_per_new_x_cached: Floats = np.zeros(0)  # coefficient of n * p
        self.decode_base_s: Floats = np.zeros(0)
        self.decode_s_per_sequence: Floats = np.zeros(0)  # times B
        self.decode_s_per_context_token: Floats = np.zeros(0)
        self.shared_chunk_s: Floats = np.zeros(0)  # time that a chunk adds to a step of decodes
        self.prefill_factor: Floats = np.zeros(0)  # factor of the profile's prefill times
        # tokens of a tile; a part of a tile takes as long as a whole one
        self.tile_tokens: Floats = np.zeros(0)
        # What prompts add to the longest gaps of the answers beside them, as learned; 0 means
        # unknown.
        self.prompt_stall_s: Floats = np.zeros(0)
        self.latency_s: Floats = np.zeros(0)  # latency of a fetch
        self.s_per_shm_byte: Floats = np.zeros(0)
        self.s_per_net_byte: Floats = np.zeros(0)
        # time to read a byte from the SSD; prohibitively long if there is no SSD
        self.s_per_ssd_byte: Floats = np.zeros(0)

        # Derived when an instance joins, leaves or changes its role.
        self.num_prefills = self.num_decodes = self.most_decode_tokens = 0
        self.least_context_tokens = 0.0
        self.infinite: Floats = np.zeros(0)  # a template to copy
        self.mixed: Bools | None = None  # the instances with both roles, or None if there are none
        # Mixed instances that fill their steps with prompts, whatever the TBT SLO; None means none.
        self.fills_steps: Bools | None = None
        self.decodes_alike = True  # whether all decode instances have the same decode coefficients
        # Rows without the role to decode that had decodes when a role last changed.
        self.remainders: list[int] = []
        # Mixed instances, where they size the chunks of prompts by the TBT SLO.
        self.beside_decodes: Rows = np.zeros(0, dtype=np.int64)
        self.num_on_host: dict[float, int] = {}
        self._hosts: dict[str, int] = {"": 0}

        # Sums and estimates over all instances.
        self.total_decoding = self.total_decoding_context = 0
        self.tbt_tail = 1.0  # learned quantile of the longest tenth of gaps over the mean gap
        self.ttft_tail = 1.0  # 90th percentile of measured over predicted TTFT; at least 1

    def __len__(self) -> int:
        return len(self.prefills)

    def join(self, row: int, info: InstanceInfo) -> None:
        """Gives an instance with nothing booked this row."""
        while len(self) <= row:
            self._add_row()
        self.ids[row] = info.instance_id
        assert not self.prefills[row] and not self.decodes[row]
        self._clear(row)
        self.chunk_tokens[row] = info.chunk_tokens
        self.set_cost(row, info.cost)
        self.prefills[row], self.decodes[row] = info.role.prefills, info.role.decodes
        capacity = info.num_blocks * info.layout.block_tokens
        self.capacity_tokens[row] = self.room_tokens[row] = capacity
        largest = (info.largest_blocks or info.num_blocks) * info.layout.block_tokens
        self.context_tokens[row] = min(largest, info.context_tokens or largest)
        # An engine without a limit of its own holds the whole pool, and the pool's room is booked.
        self.engine_tokens[row] = info.engine_tokens or np.inf
        self.set_host(row, info.address.host_id)
        self._count_roles()

    def set_host(self, row: int, host_id: str) -> None:
        """Notes the host whose memory has the instance's blocks; "" is none."""
        if left := self.host.item(row):
            self.num_on_host[left] -= 1
        self.host[row] = host = self._hosts.setdefault(host_id, len(self._hosts))
        if host:
            self.num_on_host[host] = self.num_on_host.get(host, 0) + 1

    def set_cost(self, row: int, cost: FittedCost, prefill_factor: float = 1.0) -> None:
        """Replaces the instance's cost coefficients. `prefill_factor`: what the profile's prefill
        times were multiplied by."""
        self.prefill_factor[row] = prefill_factor
        (
            self.prefill_base_s[row],
            self.prefill_s_per_token[row],
            self.prefill_s_per_token_squared[row],
            self.prefill_s_per_new_x_cached[row],
        ) = cost.prefill
        chunk_tokens = min(self.chunk_tokens.item(row), SHARED_CHUNK_TOKENS)
        self.shared_chunk_s[row] = self.prefill_s_per_token[row] * chunk_tokens
        (
            self.decode_base_s[row],
            self.decode_s_per_sequence[row],
            self.decode_s_per_context_token[row],
        ) = cost.decode
        self.tile_tokens[row] = cost.tile_tokens
        self.latency_s[row] = cost.transfer_latency_s
        self.s_per_shm_byte[row] = 1.0 / cost.shared_memory_bytes_per_s
        self.s_per_net_byte[row] = 1.0 / cost.network_bytes_per_s
        self.s_per_ssd_byte[row] = 1.0 / (cost.ssd_read_bytes_per_s or 1.0)
        self._compare_decodes()

    def leave(self, row: int) -> None:
        """Removes the instance and everything that is still booked on it."""
        self.total_decoding -= int(self.decoding_batch[row])
        self.total_decoding_context -= int(self.decoding_context[row])
        self.prefills[row] = self.decodes[row] = False
        self.set_host(row, "")
        self._clear(row)
        self._count_roles()

    def set_role(self, row: int, prefills: bool, decodes: bool) -> None:
        """Sets which work the instance accepts from now on; existing bookings remain."""
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
        """Adds a decode to the bookings; `num` -1 removes one."""
        self.booked_batch[row] += num
        self.booked_context[row] += num * context_tokens

    def book_chunked(self, row: int, num: int = 1) -> None:
        """Adds a prompt that a decode instance computes in chunks; `num` -1 removes one."""
        self.num_chunked[row] += num

    def grow(self, row: int, num_tokens: int, extra_room_tokens: int) -> None:
        """Lengthens the contexts decoded on this instance by `num_tokens` in total.
        `extra_room_tokens`: the KVCache that they need beyond what was booked for them."""
        self.booked_context[row] += num_tokens
        self.decoding_context[row] += num_tokens
        self.total_decoding_context += num_tokens
        if extra_room_tokens:
            self.room_tokens[row] -= extra_room_tokens

    # Predictions, for all rows

    def queue_s(self, now: float) -> Floats:
        """Predicted time until a new prefill starts, by row."""
        queue_s: Floats = np.maximum(self.busy_until_s - now, 0.0)
        queue_s += self.waiting_ns * S_PER_NS
        return queue_s

    def prefill_s(self, num_tokens: int, cached_tokens: Floats | float) -> Floats:
        """Predicted prefill time of a prompt, by row. `cached_tokens`: an array by row, or one
        number for all rows."""
        new = num_tokens - cached_tokens
        seconds = self._alone_prefill_s(new, cached_tokens)
        if self.remainders:
            rows = np.array(self.remainders)
            seconds[rows] = self.chunked_prefill_s(rows, seconds[rows], _of_rows(new, rows))
        if len(self.beside_decodes):
            rows = self.beside_decodes
            factor = self.prefill_factor[rows]
            profile_s = seconds[rows] / factor
            seconds[rows] = factor * self.mixed_prefill_s(rows, profile_s, _of_rows(new, rows))
        return seconds

    def rest_prefill_s(self, num_tokens: int, cached_tokens: float) -> Floats:
        """Returns the same as `prefill_s` for idle instances: by the costs measured at rest or by
        those learned since, whichever is shorter."""
        seconds = self._alone_prefill_s(num_tokens - cached_tokens, cached_tokens)
        seconds /= np.maximum(self.prefill_factor, 1.0)
        return seconds

    def _alone_prefill_s(self, new_tokens: Floats | float, cached_tokens: Floats | float) -> Floats:
        seconds: Floats = self.prefill_base_s + new_tokens * (
            self.prefill_s_per_token
            + self.prefill_s_per_token_squared * new_tokens
            + self.prefill_s_per_new_x_cached * cached_tokens
        )
        return seconds

    def chunked_prefill_s(self, rows: Rows, alone_s: Floats, new_tokens: Floats | float) -> Floats:
        """Prefill times in `rows` where prompts share each step with the decodes, in chunks that
        keep the TBT SLO. `alone_s`: the prefill times without decodes."""
        batch, decodes_s = self.booked_batch[rows], self.decodes_s(rows)
        s_per_token = np.maximum(self.prefill_s_per_token[rows], LEAST_STEP_S)
        room_s = CHUNKED_STEP_SHARE * self.tbt_slo_s - decodes_s
        tokens = np.minimum(room_s / s_per_token, self.chunk_tokens[rows])
        num_steps = np.maximum(new_tokens / np.maximum(tokens, LEAST_CHUNK_TOKENS), 1.0)
        steps_s = np.maximum(alone_s, num_steps * self.decode_base_s[rows])
        return np.where(batch > 0, steps_s + num_steps * decodes_s, alone_s)

    def mixed_prefill_s(
        self, rows: Rows, alone_s: Floats, new_tokens: Floats | float, now: bool = False
    ) -> Floats:
        """Prefill times of mixed instances (`rows`), when the chunk and the decodes of each step
        together fill whole tiles, as many as keep the TBT SLO of these decodes. `alone_s`: the
        prefill times without decodes. Counts the booked decodes, or with `now` the decodes under
        way.

        Uses profiled times only, because learned factors are ratios to profiled times. Each step
        includes a prompt's fixed time.
        """
        batch = (self.decoding_batch if now else self.booked_batch)[rows]
        context = (self.decoding_context if now else self.booked_context)[rows]
        decodes_s = self.decode_s_per_sequence[rows] * batch
        decodes_s += self.decode_s_per_context_token[rows] * context
        factor, tile = self.prefill_factor[rows], self.tile_tokens[rows]
        begin_s = self.prefill_base_s[rows] / factor
        s_per_token = np.maximum(self.prefill_s_per_token[rows] / factor, LEAST_STEP_S)
        room_s = CHUNKED_STEP_SHARE * self.tbt_slo_s - decodes_s - begin_s
        most = np.minimum(room_s / s_per_token + batch, self.chunk_tokens[rows])
        least = np.ceil((batch + LEAST_CHUNK_TOKENS) / tile)
        tokens = np.maximum(np.floor(most / tile), least) * tile
        tokens = np.maximum(np.minimum(tokens, self.chunk_tokens[rows]) - batch, 1.0)
        num_steps = np.maximum(new_tokens / tokens, 1.0)
        steps_s = alone_s + (num_steps - 1.0) * begin_s
        steps_s = np.maximum(steps_s, num_steps * self.decode_base_s[rows])
        shares = (batch > 0) & (self.chunk_tokens[rows] > 0)
        return np.where(shares, steps_s + num_steps * decodes_s, alone_s)

    def chunk_fits(self, rows: Rows) -> Bools:
        """Whether a step of the booked decodes and one tile of a prompt keeps the TBT SLO, by the
        profile's times of prompts."""
        batch, tile = self.booked_batch[rows], self.tile_tokens[rows]
        tokens = np.ceil((batch + LEAST_CHUNK_TOKENS) / tile) * tile - batch
        chunk_s = self.prefill_base_s[rows] + self.prefill_s_per_token[rows] * tokens
        chunk_s = np.maximum(chunk_s / self.prefill_factor[rows], self.decode_base_s[rows])
        fits: Bools = chunk_s + self.decodes_s(rows) <= CHUNKED_STEP_SHARE * self.tbt_slo_s
        return fits

    def decodes_s(self, rows: Rows) -> Floats:
        """What the booked decodes of `rows` add to the time of an empty step."""
        seconds: Floats = self.decode_s_per_sequence[rows] * self.booked_batch[rows]
        seconds += self.decode_s_per_context_token[rows] * self.booked_context[rows]
        return seconds

    @property
    def holds_answers(self) -> Bools:
        """Returns the instances whose free KVCache is room for answers: decode instances, and
        instances that still have answers from before a change of their role."""
        holds: Bools = self.decodes | (self.room_tokens < self.capacity_tokens)
        return holds

    def most_room_tokens(self) -> float:
        """The most room for answers that one instance has, in tokens of KVCache."""
        return float(self.room_tokens[self.holds_answers].max(initial=0.0))

    def decodes_remain(self, row: int) -> bool:
        """Whether an instance that no longer has the decode role still has decodes."""
        return row in self.remainders and self.booked_batch.item(row) > 0

    def without_remainders(self, batch: float, context_tokens: float) -> tuple[float, float]:
        """Returns the part of the batch and of its context that runs on decode instances."""
        for row in self.remainders:
            batch -= self.decoding_batch.item(row)
            context_tokens -= self.decoding_context.item(row)
        return max(batch, 0.0), max(context_tokens, 0.0)

    def booked_tbt_s(self, context_tokens: int) -> Floats:
        """Predicted step time with all booked decodes and one more of `context_tokens`, by row."""
        return self._step_s(self.booked_batch + 1.0, self.booked_context + float(context_tokens))

    def tbt_s(self, row: int, batch: float, context_tokens: float) -> float:
        """Predicted step time of one instance with this batch, and with a chunk if prompts are
        computed beside it."""
        seconds = (
            self.decode_base_s.item(row)
            + self.decode_s_per_sequence.item(row) * batch
            + self.decode_s_per_context_token.item(row) * context_tokens
        )
        return seconds + self.shared_chunk_s.item(row) if self.num_chunked[row] else seconds

    def fills(self, row: int) -> bool:
        """Whether the instance fills its steps with prompts, whatever the TBT SLO."""
        return self.fills_steps is not None and bool(self.fills_steps.item(row))

    def decodes_beside_s(self, row: int, placed_s: float | None) -> float:
        """Returns how long a step without prompts took at most during an answer that ends. This is
        the prediction from the time of its placement (`placed_s`) or the present one, whichever is
        longer. The present prediction alone would attribute the time of answers that have ended
        since to prompts."""
        now_s = self.tbt_s(row, self.decoding_batch.item(row), self.decoding_context.item(row))
        return max(placed_s or 0.0, now_s)

    def tbt_tail_of(self, row: int) -> float:
        """Returns `tbt_tail` for a decode instance, and 1 for a mixed one, whose longest gaps
        follow from the chunks of its prompts."""
        mixed = self.mixed is not None and self.mixed.item(row)
        return 1.0 if mixed else self.tbt_tail

    def level_tbt_s(self, batch: float, context_tokens: float) -> float:
        """Step time if `batch` decodes are spread so that it is equal on all decode instances.

        Slower instances then take fewer decodes, and an instance whose empty step takes longer than
        the equal step time takes none.
        """
        base_s = self.decode_base_s[self.decodes]
        per_sequence_s = self.decode_s_per_sequence[self.decodes]
        per_token_s = self.decode_s_per_context_token[self.decodes]
        mean_context = context_tokens / max(batch, 1.0)
        each_s = np.maximum(per_sequence_s + per_token_s * mean_context, LEAST_STEP_S)
        order = np.argsort(base_s, kind="stable")
        rates = 1.0 / each_s[order]
        # Sums over the first 1, 2, ... instances; a sum in a fixed order is the same on every
        # machine.
        levels_s = (batch + np.cumsum(base_s[order] * rates)) / np.cumsum(rates)
        next_s = np.append(base_s[order][1:], np.inf)
        return float(levels_s[int(np.argmax(levels_s <= next_s))])

    # Load: predicted latency over its SLO

    def prefill_load(self, slo: Slo, now: float) -> float:
        """Mean over prefill instances of the queueing delay relative to the TTFT SLO."""
        if not self.num_prefills:
            return 0.0
        waits_ns = np.rint(self.queue_s(now)[self.prefills] * 1e9).astype(np.int64)
        return int(waits_ns.sum()) / self.num_prefills * S_PER_NS / slo.ttft_s

    def decode_load(self, slo: Slo) -> float:
        """Mean over decode instances of the step time relative to the TBT SLO, or of the used share
        of the engine's memory where that is higher. An idle instance counts as 0."""
        if not self.num_decodes:
            return 0.0
        loads = self._loads(slo, self.decoding_batch, self.decoding_context)
        loads[self.decoding_batch == 0] = 0.0
        return self._mean_of_decodes(loads)

    def spread_decode_load(self, slo: Slo, count: float, context_tokens: float) -> float:
        """Returns `decode_load` if `count` decodes were spread evenly over the decode instances."""
        if not self.num_decodes or not count:
            return 0.0
        num = self.num_decodes
        return self._mean_of_decodes(self._loads(slo, count / num, context_tokens / num))

    def _step_s(self, batch: Floats | float, context_tokens: Floats | float) -> Floats:
        seconds: Floats = (
            self.decode_base_s
            + self.decode_s_per_sequence * batch
            + self.decode_s_per_context_token * context_tokens
        )
        if np.count_nonzero(self.num_chunked):
            seconds += np.where(self.num_chunked > 0, self.shared_chunk_s, 0.0)
        return seconds

    def _loads(self, slo: Slo, batch: Floats | float, context_tokens: Floats | float) -> Floats:
        memory = context_tokens / np.maximum(self.engine_tokens, 1.0)
        loads: Floats = np.maximum(self._step_s(batch, context_tokens) / slo.tbt_s, memory)
        return loads

    def _mean_of_decodes(self, loads: Floats) -> float:
        # Whole numbers have the same sum in any order, so all machines agree.
        billionths = np.rint(loads[self.decodes] * 1e9).astype(np.int64)
        return int(billionths.sum()) / self.num_decodes * 1e-9

    def _add_row(self) -> None:
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(self, name, np.append(values, np.zeros(1, dtype=values.dtype)))
        self.ids.append(InstanceId(""))

    def _clear(self, row: int) -> None:
        self.waiting_ns[row] = self.room_tokens[row] = self.num_serving[row] = 0
        self.num_chunked[row] = 0
        self.prompt_stall_s[row] = 0.0
        self.booked_batch[row] = self.booked_context[row] = 0
        self.decoding_batch[row] = self.decoding_context[row] = 0
        self.busy_until_s[row] = self.last_placed_s[row] = NEVER_S

    def _compare_decodes(self) -> None:
        rows = self.decodes
        coefficients = (
            self.decode_base_s[rows],
            self.decode_s_per_sequence[rows],
            self.decode_s_per_context_token[rows],
        )
        self.decodes_alike = all(bool((one == one[:1]).all()) for one in coefficients)

    def _count_roles(self) -> None:
        self.num_prefills = int(np.count_nonzero(self.prefills))
        self.num_decodes = int(np.count_nonzero(self.decodes))
        self._compare_decodes()
        both = self.prefills & self.decodes
        self.mixed = both if both.any() else None
        fills = both & (self.chunk_tokens == 0)
        self.fills_steps = fills if fills.any() else None
        self.remainders = (~self.decodes & (self.booked_batch > 0)).nonzero()[0].tolist()
        self.beside_decodes = (both & self._sizes_chunks).nonzero()[0]
        self.most_decode_tokens = int(self.context_tokens[self.decodes].max(initial=0))
        serving = self.prefills | self.decodes
        self.least_context_tokens = float(self.context_tokens[serving].min(initial=np.inf))
        self.infinite = np.full(len(self), np.inf)


def _of_rows(values: Floats | float, rows: Rows) -> Floats | float:
    return values[rows] if isinstance(values, np.ndarray) else values

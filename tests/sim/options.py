"""Holds the options of a run, drawn from its seed and printed when the run fails."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Options:
    """Holds one run's options. Rates are probabilities per occasion until the faults end."""

    num_prefill: int
    num_decode: int
    num_mixed: int
    block_tokens: int
    num_layers: int
    num_blocks: int  # per instance
    chunk_tokens: int
    max_sequences: int
    max_repeats: int
    prefix_caching: bool
    eviction: str
    admission: str
    placement: str
    decode_prediction: str
    inline_prefill: bool
    threshold: float
    # whether the Conductor expects answers of one token, so that decodes run out of blocks
    books_little: bool
    num_requests: int
    num_recent: int  # number of conversations that may continue
    arrivals_s: float
    max_prompt_tokens: int
    max_answer_tokens: int
    slow_delay_s: float
    transfer_is_cheap: bool
    tight_slo_rate: float
    short_deadline_rate: float
    cancel_rate: float
    num_deaths: int
    num_unlinks: int
    num_head_crashes: int
    role_balance: str
    num_role_switches: int  # number of role switches that the test forces
    num_drains: int  # number of drained instances, as a share of all
    corrupt_rate: float
    missing_rate: float
    break_rate: float
    refuse_connection_rate: float
    stall_rate: float  # share of fetches that stall
    step_failure_rate: float
    lost_event_rate: float
    num_slots: int  # slots of each instance's SSD; 0 means no SSD
    ssd_admission: str
    loading_is_cheap: bool
    flip_rate: float  # share of the blocks written to an SSD in which a bit flips
    disk_failure_rate: float
    num_disk_losses: int
    num_stages: int  # number of stages of each instance's pipeline
    # arenas of an instance without SSD and stages; 0 means only the instance's own memory
    num_arenas: int = 0
    arena_loss_rate: float = 0.0  # chance per step that an arena is lost
    segment_blocks: int = 0  # number of consecutive blocks of a sequence in one arena; 0 means all
    store_shared: bool = False  # whether one shared store replaces the disks
    disk_hang_rate: float = 0.0  # share of stores and loads that hang
    keeps_streams: bool = False  # whether the next head continues the answers of a crashed head
    # The fields below are left out of the repr, because the repr is the seed of other draws.
    engine: str = field(default="moonpool", repr=False)
    # whether a vLLM publishes resets of its cache
    publishes_events: bool = field(default=True, repr=False)
    lost_batch_rate: float = field(default=0.0, repr=False)  # share of KV events that are lost
    # how often a prefill draws another first token than the decode instance would
    near_tie_rate: float = field(default=0.0, repr=False)
    # share of handed-over KVCache that is gone
    handover_loss_rate: float = field(default=0.0, repr=False)
    num_head_pauses: int = field(default=0, repr=False)
    num_pauses: int = field(default=0, repr=False)  # number of paused instances, as a share of all
    # number of instances that are upgraded; 0 if all are of one release
    num_upgrades: int = field(default=0, repr=False)
    # whether the first head is of the earlier release
    head_is_old: bool = field(default=False, repr=False)
    # the tenants with their shares
    tenants: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    # whether no chunk fits beside the decodes of mixed instances
    splits_mixed: bool = field(default=False, repr=False)

    def shown(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())

    @property
    def arenas(self) -> tuple[int, ...]:
        """Returns the blocks of each arena of an instance, or nothing if the instance has only its
        own arena."""
        plain = not self.num_slots and self.num_stages == 1
        return (self.num_blocks,) * self.num_arenas if plain else ()

    @property
    def layer_wise_load(self) -> bool:
        """Whether prompts may be computed while their prefix arrives. Stages and attention workers
        cannot do that."""
        return self.num_stages == 1 and not self.arenas and self.num_requests % 5 > 0

    @property
    def faultless(self) -> bool:
        rates = (
            self.corrupt_rate,
            self.missing_rate,
            self.break_rate,
            self.refuse_connection_rate,
            self.stall_rate,
            self.step_failure_rate,
            self.flip_rate,
            self.arena_loss_rate,
            self.disk_failure_rate,
            self.disk_hang_rate,
            self.near_tie_rate,
            self.handover_loss_rate,
        )
        if self.num_disk_losses or self.num_drains or self.num_upgrades:
            return False
        if self.num_head_pauses or self.num_pauses:
            return False
        return not (self.num_deaths or self.num_unlinks or self.num_head_crashes or any(rates))


def draw_options(rng: random.Random) -> Options:
    """Draws the options. As in swarm testing, each kind of fault occurs only in some runs, so that
    no fault always hides another fault."""

    def maybe(value: float, chance: float = 0.4) -> float:
        return value * rng.random() if rng.random() < chance else 0.0

    def disk(value: float) -> float:
        return value * disks.random() if num_slots and disks.random() < 0.3 else 0.0

    disaggregated = rng.random() < 0.8
    num_mixed = rng.choice((0, 0, 0, 1, 2)) if disaggregated else rng.randint(1, 3)
    block_tokens, max_prompt_tokens = rng.choice((1, 2, 4, 4, 8)), rng.choice((12, 30, 60))
    max_answer_tokens = rng.choice((1, 4, 12, 30, 60))
    policies, disks = (random.Random(rng.getrandbits(64)) for _ in range(2))
    num_slots = disks.choice((0, 3, 12, 60, 300))
    longest_blocks = -(-(max_prompt_tokens + max_answer_tokens) // block_tokens)
    options = Options(
        num_prefill=rng.choice((1, 1, 2, 3)) if disaggregated else 0,
        num_decode=rng.choice((1, 1, 2, 3)) if disaggregated else 0,
        num_mixed=num_mixed,
        block_tokens=block_tokens,
        num_layers=rng.randint(1, 3),
        num_blocks=max(1, int(longest_blocks * rng.choice((0.7, 1.0, 1.3, 2.0, 3.0, 6.0)))) + 1,
        chunk_tokens=rng.choice((1, 3, 8, 16, 64)),
        max_sequences=rng.choice((1, 2, 4, 16)),
        max_repeats=rng.choice((1, 1, 3, 16)),
        prefix_caching=rng.random() < 0.9,
        eviction=rng.choice(("lru", "lfu", "length-aware", "predictive")),
        admission=policies.choice(("none", "baseline", "early", "predictive")),
        placement=policies.choice(
            ("random", "load-balancing", "cache-aware", *["kvcache-centric"] * 3)
        ),
        decode_prediction=policies.choice(("duration", "length")),
        inline_prefill=policies.random() < 0.5,
        threshold=rng.choice((1.0, 1.0, 1.5)),
        books_little=rng.random() < 0.4,
        role_balance=(balance := policies.choice(("off", "off", "switch"))),
        num_role_switches=policies.choice((0, 1, 4)) if balance == "switch" else 0,
        num_requests=rng.randint(3, 14),
        num_recent=3,
        arrivals_s=rng.choice((0.0, 0.3, 2.0, 5.0)),
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        slow_delay_s=rng.choice((0.0, 0.01, 0.2)),
        transfer_is_cheap=rng.random() < 0.85,
        tight_slo_rate=maybe(1.0, 0.4),
        short_deadline_rate=maybe(0.5, 0.3),
        cancel_rate=maybe(0.6),
        num_deaths=rng.choice((0, 0, 1, 3)),
        num_unlinks=rng.choice((0, 0, 0, 1)),
        num_head_crashes=rng.choice((0, 0, 0, 0, 1)),
        corrupt_rate=maybe(0.1),
        missing_rate=maybe(0.05, 0.2),
        break_rate=maybe(0.1),
        refuse_connection_rate=maybe(0.3, 0.25),
        stall_rate=maybe(0.3, 0.25),
        step_failure_rate=maybe(0.1, 0.25),
        lost_event_rate=maybe(0.2, 0.2),
        num_slots=num_slots,
        ssd_admission=disks.choice(("second-use", "always")),
        loading_is_cheap=disks.random() < 0.9,
        flip_rate=disk(0.3),
        disk_failure_rate=disk(0.2),
        num_disk_losses=disks.choice((0, 0, 0, 1)) if num_slots else 0,
        num_stages=policies.choice((1, 1, 1, 2, 3)),
        num_drains=policies.choice((0, 0, 1, 3)),
    )
    drawn = _draw_disks(options, disks) if num_slots else _draw_arenas(options, policies)
    return functools.reduce(lambda options, kind: kind(options), KINDS, drawn)


def _draw_takeovers(options: Options) -> Options:
    """In some runs, lets other heads replace crashed heads without a loss. The draws of other runs
    stay as they were."""
    rng = random.Random(repr(options) + "heads")
    if options.num_head_crashes:
        return replace(options, keeps_streams=rng.random() < 0.7)
    if rng.random() < 0.1:
        return replace(options, keeps_streams=True, num_head_crashes=rng.randint(1, 3))
    return options


def _draw_vllm(options: Options) -> Options:
    """Makes some clusters of vLLM servers, without faults in parts of moonpool's engine. The draws
    of other runs stay as they were."""
    rng = random.Random(repr(options) + "vllm")
    if rng.random() >= 0.08:
        return options

    def maybe(value: float) -> float:
        return value * rng.random() if rng.random() < 0.4 else 0.0

    return replace(
        options,
        engine="vllm",
        publishes_events=rng.random() < 0.75,
        lost_batch_rate=maybe(0.1),
        near_tie_rate=maybe(0.3),
        handover_loss_rate=maybe(0.3),
        num_slots=0,
        num_stages=1,
        num_arenas=0,
        role_balance="off",
        num_role_switches=0,
        num_disk_losses=0,
        corrupt_rate=0.0,
        missing_rate=0.0,
        stall_rate=0.0,
        flip_rate=0.0,
        disk_failure_rate=0.0,
        disk_hang_rate=0.0,
        arena_loss_rate=0.0,
        store_shared=False,
        transfer_is_cheap=True,
    )


def _draw_pauses(options: Options) -> Options:
    """Stops head or instances for a while in some runs."""
    rng = random.Random(repr(options) + "pauses")
    if rng.random() >= 0.08:
        return options
    num_head_pauses = rng.choice((0, 1, 1, 2))
    num_pauses = rng.choice((0, 1, 3)) if num_head_pauses else rng.choice((1, 3))
    return replace(options, num_head_pauses=num_head_pauses, num_pauses=num_pauses)


def _draw_upgrades(options: Options) -> Options:
    """Makes some clusters of two releases, which are upgraded during the run."""
    rng = random.Random(repr(options) + "upgrades")
    if rng.random() >= 0.06:
        return options
    return replace(options, num_upgrades=rng.randint(1, 5), head_is_old=rng.random() < 0.4)


def _draw_tenants(options: Options) -> Options:
    """Lets tenants with shares and priorities compete for a cluster with little room, in some
    runs."""
    rng = random.Random(repr(options) + "tenants")
    if rng.random() >= 0.06:
        return options
    names = ("a", "b", "c", "d")[: rng.randint(2, 4)]
    return replace(
        options,
        tenants=tuple((name, rng.choice((0.5, 1.0, 1.0, 4.0))) for name in names),
        num_requests=rng.randint(15, 40),
        arrivals_s=rng.choice((0.3, 2.0)),
        max_sequences=min(options.max_sequences, 4),
    )


def _draw_split(options: Options) -> Options:
    """Gives mixed instances separate roles, which follow the load, in some runs."""
    rng = random.Random(repr(options) + "split")
    if rng.random() >= 0.06 or options.engine == "vllm":
        return options
    return replace(options, splits_mixed=True, num_mixed=rng.randint(2, 4))


def _draw_arenas(options: Options, rng: random.Random) -> Options:
    num_arenas, loss_rate = rng.choice((0, 0, 1, 2, 3)), rng.choice((0.0, 0.02, 0.1))
    segment_blocks = random.Random(repr(options)).choice((0, 0, 1, 2, 5))
    drawn = replace(
        options,
        num_arenas=num_arenas,
        arena_loss_rate=loss_rate,
        segment_blocks=segment_blocks,
    )
    return drawn if drawn.arenas else options


def _draw_disks(options: Options, rng: random.Random) -> Options:
    if rng.random() < 0.5:
        options = _busy_disks(options, rng)
    options = replace(options, store_shared=rng.random() < 0.35)
    hangs = random.Random(repr(options))
    if not options.store_shared and hangs.random() < 0.3:
        return replace(options, disk_hang_rate=0.3 * hangs.random())
    return options


def _busy_disks(options: Options, rng: random.Random) -> Options:
    """Makes many conversations with long pauses, on few instances with little memory."""
    longest_blocks = -(-(60 + options.max_answer_tokens) // options.block_tokens)
    return replace(
        options,
        num_prefill=min(options.num_prefill, rng.randint(1, 2)),
        num_decode=min(options.num_decode, 1),
        num_mixed=min(options.num_mixed, 1),
        num_blocks=int(longest_blocks * rng.choice((1.1, 1.5, 2.5))) + 2,
        prefix_caching=True,
        num_requests=rng.randint(20, 50),
        num_recent=rng.choice((8, 20)),
        max_prompt_tokens=60,
        arrivals_s=rng.choice((2.0, 5.0)),
        ssd_admission=rng.choice(("second-use", "always", "always")),
        cancel_rate=options.cancel_rate / 3,
    )


KINDS = (_draw_takeovers, _draw_vllm, _draw_pauses, _draw_upgrades, _draw_tenants, _draw_split)
"""Kinds of runs that are drawn after the other options. Each has its own random generator, so that
a new kind leaves other runs unchanged."""

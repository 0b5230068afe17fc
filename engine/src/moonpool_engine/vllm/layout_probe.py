"""Proves by computation that a `CacheLayout` names the bytes of vLLM's blocks.

vLLM's own runner computes two prompts. Then the blocks of their prefixes are copied out and into
other blocks, as the pool copies them, and only the tails are computed, over the copies. The next
log-probabilities have to be the same. Over blocks that were not copied, the results must differ;
otherwise the proof could not fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool_engine.vllm.block_views import BlockViews, first_difference
from moonpool_engine.vllm.cache_layout import Addresses, CacheGroup, CacheLayout, LayoutRefused
from moonpool_engine.vllm.probe_plan import Places, ProbePrompt, plan_prompts
from moonpool_engine.vllm.ranks import agreed, is_last_stage
from moonpool_engine.vllm.slice_mover import SliceMover
from moonpool_engine.vllm.worker_steps import HandRequest, Logprobs, WorkerSteps

if TYPE_CHECKING:
    import torch

POISON = 0x3F  # an ordinary number in each format, because kernels may read it, masked
MOST_NOISE = 0.05
"""Greatest difference of a log-probability between two equal steps on a GPU. On a CPU there is
none."""
NOISE_MARGIN = 4.0
LEAST_EFFECT = 10.0
"""The check computes over blocks that were not copied, too. The difference that they make must be
more than this many times the tolerance."""

Outcome = list[Logprobs]
"""The outcome of each prompt; empty on a rank without the last layer, which judges bytes alone."""
Read = Callable[[Mapping[str, "torch.Tensor"], Any], CacheLayout]


def proven_layout(
    worker: Any,
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    mover: SliceMover,
    read: Read = CacheLayout.of,
) -> CacheLayout:
    """The layout that `read` finds, proven with the runner of vLLM's `worker` and with `mover`.

    All ranks of a vLLM call it at the same time: after vLLM has compiled and warmed up, while it
    has no requests. Raises LayoutRefused on all ranks if it is refused on one.
    """
    found: list[tuple[CacheLayout, _Probe]] = []

    def prepare() -> None:
        layout = read(kv_caches, kv_cache_config)
        views = BlockViews(kv_caches, kv_cache_config)
        found.append((layout, _Probe(WorkerSteps(worker), layout, mover, views)))

    agreed(prepare)
    layout, probe = found[0]
    agreed(probe.run)
    return layout


class _Probe:
    """One proof. All ranks run the same steps even if one of them finds an error: errors are kept
    in `wrong`, and raised at the end. Raises LayoutRefused if there is no room for it."""

    def __init__(
        self, steps: WorkerSteps, layout: CacheLayout, mover: SliceMover, views: BlockViews
    ) -> None:
        self._steps, self._layout, self._mover, self._views = steps, layout, mover, views
        if layout.device_type not in mover.device_types:
            raise LayoutRefused(
                f"KVCache is in {layout.device_type} memory, the mover cannot reach"
            )
        reason = steps.why_unfit()
        if reason:
            raise LayoutRefused(reason)
        self._prompts = plan_prompts(
            layout.groups, layout.num_blocks, steps.vocabulary, steps.most_prompt_tokens
        )
        self._tolerance = 0.0
        self.wrong: list[str] = []

    def run(self) -> None:
        """Raises LayoutRefused with the first thing that was wrong."""
        copied = [prompt.copied for prompt in self._prompts]
        with self._steps.alone():
            try:
                control = self._control()
                self._measure_noise(control)
                self._check_that_it_can_fail(control, copied)
                self._check_copies(control, copied, self._prompts)
                mixed = [prompt.reversed_copy(self._layout.groups) for prompt in self._prompts]
                self._check_copies(control, mixed, self._prompts[::-1])
            finally:
                self._clear()
        if self.wrong:
            raise LayoutRefused(self.wrong[0])

    def _control(self) -> Outcome:
        """Computes both prompts from their beginning, and their tails in one step."""
        requests = [self._request(p, p.computed, 0) for p in self._prompts]
        for request, prompt in zip(requests, self._prompts, strict=True):
            while left := prompt.prefix_tokens - request.num_computed:
                self._step([(request, min(left, self._steps.most_tokens))])
        control = self._tails(requests)
        if not all(math.isfinite(x) for found in control for x in found.values()):
            self.wrong.append("vLLM's own log-probabilities are not all numbers")
        return control

    def _measure_noise(self, control: Outcome) -> None:
        """Measures by how much two steps over the same blocks differ, and sets the tolerance from
        it."""
        noise = difference(control, self._tails_over([p.computed for p in self._prompts]))
        if noise > (0.0 if self._layout.device_type == "cpu" else MOST_NOISE):
            self.wrong.append(
                "vLLM itself gives other log-probabilities over the same blocks a second time,"
                f" by up to {noise:.3g}"
            )
        self._tolerance = NOISE_MARGIN * noise

    def _check_that_it_can_fail(self, control: Outcome, places: Sequence[Places]) -> None:
        """Checks for each prompt that a wrong copy would have been noticed."""
        self._fill(places, POISON)
        outcome = self._tails_over(places)
        for one, other in zip(control, outcome, strict=True):
            effect = difference([one], [other])
            if effect <= LEAST_EFFECT * self._tolerance:
                self.wrong.append(
                    "other bytes in the blocks of a prompt do not change what follows it"
                    f" (log-probabilities by {effect:.3g}): nothing can be proven"
                )

    def _check_copies(
        self, control: Outcome, places: Sequence[Places], order: Sequence[ProbePrompt]
    ) -> None:
        """Copies the prefixes to `places`, the prompts in `order`, and computes tails over them."""
        self._fill(places, POISON)
        bystanders = [((0,),) * len(self._layout.groups), *(p.computed for p in self._prompts)]
        before = [self._views.read(blocks) for blocks in bystanders]
        for prompt in order:
            self._copy(prompt, places[self._prompts.index(prompt)])
        after = [self._views.read(blocks) for blocks in bystanders]
        layer = self._changed_layer(places)
        wrong = difference(control, self._tails_over(places))
        if wrong > self._tolerance:
            where = f", first of layer {layer}" if layer else ""
            self.wrong.append(
                f"over copied blocks log-probabilities differ by up to {wrong:.3g}{where}"
            )
        elif layer:
            self.wrong.append(f"layer {layer}: copies of blocks have other bytes")
        for kept, found in zip(before, after, strict=True):
            if layer := first_difference(kept, found):
                self.wrong.append(f"layer {layer}: a copy of a block wrote into another one")

    def _copy(self, prompt: ProbePrompt, places: Places) -> None:
        """Copies the blocks of a prompt's prefix to the host's memory, and from there to `places`.
        Records an error if the mover refuses."""
        groups = self._layout.groups
        sources, targets = (prompt.prefix_of(p, groups) for p in (prompt.computed, places))
        for group, here, there in zip(groups, sources, targets, strict=True):
            try:
                self._move(self._inside(group, here), self._inside(group, there))
            except (LayoutRefused, IndexError, ValueError, OSError) as error:
                self.wrong.append(str(error))

    def _move(self, exported: Addresses, imported: Addresses) -> None:
        size = self._layout.slice_bytes
        memory = np.zeros(len(exported) * size + 64, dtype=np.uint8)
        start = -(-memory.ctypes.data // 64) * 64
        between = (start + size * np.arange(len(exported))).astype(np.uint64)
        sums = self._mover.copy(exported, between, size)
        if not np.array_equal(sums, self._mover.copy(between, imported, size)):
            raise LayoutRefused("two copies of the same slices have other sums")

    def _inside(self, group: CacheGroup, blocks: Sequence[int]) -> Addresses:
        found = self._layout.addresses(group.index, blocks)
        if not self._views.contain(found, self._layout.slice_bytes):
            raise LayoutRefused(f"blocks of group {group.index} lie outside of vLLM's tensors")
        return found

    def _changed_layer(self, places: Sequence[Places]) -> str | None:
        """Returns the first layer of which a copied block differs from its source, or None."""
        for prompt, there in zip(self._prompts, places, strict=True):
            pair = (prompt.prefix_of(p, self._layout.groups) for p in (prompt.computed, there))
            if layer := first_difference(*map(self._views.read, pair)):
                return layer
        return None

    def _tails_over(self, places: Sequence[Places]) -> Outcome:
        """Computes only the tails, as if the prefixes had been found in these blocks, and returns
        the outcome."""
        pairs = zip(self._prompts, places, strict=True)
        return self._tails([self._request(p, blocks, p.prefix_tokens) for p, blocks in pairs])

    def _tails(self, requests: Sequence[HandRequest]) -> Outcome:
        found = self._step([(r, len(r.tokens) - r.num_computed) for r in requests])
        self._steps.finish()
        if not is_last_stage():
            return []
        return [found.get(r.name, {}) for r in requests]

    def _step(self, chunks: Sequence[tuple[HandRequest, int]]) -> dict[str, Logprobs]:
        """Runs a step on all ranks; if it failed on one of them only, the others would wait for
        it."""
        found: dict[str, Logprobs] = {}
        agreed(lambda: found.update(self._steps.step(chunks)))
        return found

    def _request(self, prompt: ProbePrompt, places: Places, computed: int) -> HandRequest:
        return HandRequest(prompt.name, prompt.tokens, places, computed)

    def _fill(self, places: Sequence[Places], byte: int) -> None:
        for blocks in places:
            self._views.fill(blocks, byte)

    def _clear(self) -> None:
        """Restores the blocks to the state in which vLLM has made them. A wrong layout may have
        written into any block."""
        if self.wrong:
            self._views.clear()
        for prompt in self._prompts:
            self._fill([prompt.computed, prompt.copied], 0)


def difference(one: Outcome, other: Outcome) -> float:
    """The largest difference between the log-probabilities of two outcomes. A token that only one
    outcome lists counts as being as likely as the last token of the other outcome."""
    found = 0.0
    for a, b in zip(one, other, strict=True):
        if not all(map(math.isfinite, (*a.values(), *b.values()))):
            return math.inf
        for token in a.keys() | b.keys():
            left, right = (x.get(token, min(x.values(), default=0.0)) for x in (a, b))
            found = max(found, abs(left - right))
    return found

"""Progress of a fetch or load, layer by layer, for readers that start before all layers have
arrived.

The thread that moves the blocks opens the `LayerGate`, and a reader waits at it:

    closed -> open for the first layers -> open for all, once the operation's end was reported
    any state -> broken: a layer that is not open by then will never open
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.protocol.transfer_events import FetchEnded, FetchProgress, MessengerEvent

PROGRESS_PARTS = 8
"""The most progress events per operation."""


class LayerGate:
    """Open for a layer once that layer has arrived, verified, in every block of the operation.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_open = 0
        self._broken = False

    def open(self, num_layers: int) -> None:
        """Opens the gate for the first `num_layers` layers. Open layers never close again."""
        with self._changed:
            self._num_open = max(self._num_open, num_layers)
            self._changed.notify_all()

    def end(self, complete: bool) -> None:
        """Notes that the operation's end has been reported. Opens the gate for all layers if
        `complete`, and breaks it otherwise."""
        with self._changed:
            if complete and not self._broken:
                self._num_open = sys.maxsize
            self._broken = True
            self._changed.notify_all()

    def break_gate(self) -> None:
        """Breaks the gate: no further layer will open."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def wait(self, layer: int, deadline_s: float) -> bool:
        """Blocks until the gate is open for `layer`. Returns False if it broke, or did not open by
        the deadline."""
        if self._num_open > layer:
            return True
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or self._num_open > layer,
                max(0.0, deadline_s - time.monotonic()),
            )
            return self._num_open > layer


class FetchProgressReporter:
    """Reports a fetch's progress to its gate, and to the worker as FetchProgress. Thread-safe.

    Part i of the fetch requests `requested[i]` blocks, which follow the blocks of part i - 1."""

    def __init__(
        self,
        fetch_id: str,
        requested: Sequence[int],
        num_layers: int,
        gate: LayerGate,
        post: Callable[[MessengerEvent], None],
    ) -> None:
        self._fetch_id = fetch_id
        self._requested = requested
        self._num_layers = num_layers
        self._gate = gate
        self._post = post
        self._lock = threading.Lock()  # guards the fields below, and the order of the events
        self._granted: list[int | None] = [None] * len(requested)
        self._layers = [0] * len(requested)
        self._num_blocks: int | None = None
        self._started_s = 0.0
        self._reported_layers = 0

    def granted(self, part: int, num_blocks: int) -> None:
        """Notes that the source grants the first `num_blocks` blocks of the part. A second
        transport may grant fewer than the first."""
        with self._lock:
            self._started_s = self._started_s or time.monotonic()
            self._granted[part] = num_blocks
            before, self._num_blocks = self._num_blocks, self._leading_granted()
            if self._num_blocks is None:
                return
            if before is not None and self._num_blocks < before:
                # a reader may rely on the larger number, so the gate is broken
                self._gate.break_gate()
            self._post(FetchProgress(fetch_id=self._fetch_id, num_blocks=self._num_blocks))

    def arrived(self, part: int, num_layers: int) -> None:
        """Notes that the first layers of all granted blocks of the part have arrived and are
        verified."""
        with self._lock:
            self._layers[part] = num_layers
            num_layers = min(self._complete_layers(), self._num_layers - 1)
            if self._num_blocks is None or num_layers <= self._reported_layers:
                return
            self._gate.open(num_layers)
            new = range(self._reported_layers + 1, num_layers + 1)
            steps = [layers for layers in new if _is_progress_step(layers, self._num_layers)]
            if steps:
                seconds = time.monotonic() - self._started_s
                self._post(FetchProgress(self._fetch_id, self._num_blocks, steps[-1], seconds))
            self._reported_layers = num_layers

    def break_gate(self) -> None:
        """Notes that not all granted blocks will arrive."""
        self._gate.break_gate()

    def end(self, ended: FetchEnded) -> None:
        """Notes that the end of the fetch has been posted."""
        self._gate.end(not ended.error and ended.num_blocks == self._num_blocks)

    def _leading_granted(self) -> int | None:
        """Returns the number of blocks before the first that is not granted, or None while a grant
        that decides it is missing."""
        total = 0
        for requested, granted in zip(self._requested, self._granted, strict=True):
            if granted is None:
                return None
            total += granted
            if granted < requested:
                break
        return total

    def _complete_layers(self) -> int:
        """Returns the layers that have arrived in every part up to the first not fully granted."""
        least = self._num_layers
        parts = zip(self._requested, self._granted, self._layers, strict=True)
        for requested, granted, layers in parts:
            if granted:
                least = min(least, layers)
            if granted != requested:
                break
        return least


def _is_progress_step(num_layers: int, all_layers: int) -> bool:
    """Whether progress is reported after this number of layers."""
    step = max(1, all_layers // PROGRESS_PARTS)
    return 0 < num_layers < all_layers and num_layers % step == 0

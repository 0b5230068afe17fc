"""How far a fetch has come, by one connection or by several at once: what its gate and the worker
are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from moonpool.kvcache.transfers import FetchEnded, FetchProgress
from moonpool.messenger.gate import LayerGate, tells_progress
from moonpool.messenger.station import Station


class Progress:
    """Of a fetch whose part i asks for `asked[i]` blocks, one part's behind the other's.
    Thread-safe."""

    def __init__(
        self, fetch_id: str, asked: Sequence[int], gate: LayerGate, station: Station
    ) -> None:
        self._fetch_id = fetch_id
        self._asked = asked
        self._gate = gate
        self._station = station
        self._lock = threading.Lock()  # guards what follows, and the order of what is told
        self._granted: list[int | None] = [None] * len(asked)
        self._layers = [0] * len(asked)
        self._num_blocks: int | None = None
        self._started_s = 0.0
        self._told_layers = 0

    def granted(self, part: int, num_blocks: int) -> None:
        """The source lends the first `num_blocks` of that part's blocks; maybe anew, with fewer."""
        with self._lock:
            self._started_s = self._started_s or time.monotonic()
            self._granted[part] = num_blocks
            before, self._num_blocks = self._num_blocks, self._all_granted()
            if self._num_blocks is None:
                return
            if before is not None and self._num_blocks < before:
                self._gate.break_off()  # somebody may have counted on all of them
            self._station.post(FetchProgress(fetch_id=self._fetch_id, num_blocks=self._num_blocks))

    def arrived(self, part: int, num_layers: int) -> None:
        """The first layers of all that was granted of that part have arrived, and hold."""
        all_layers = self._station.arena.layout.num_layers
        with self._lock:
            self._layers[part] = num_layers
            num_layers = min(self._whole_layers(), all_layers - 1)
            if self._num_blocks is None or num_layers <= self._told_layers:
                return
            self._gate.open(num_layers)
            occasions = range(self._told_layers + 1, num_layers + 1)
            told = [layers for layers in occasions if tells_progress(layers, all_layers)]
            if told:
                seconds = time.monotonic() - self._started_s
                event = FetchProgress(self._fetch_id, self._num_blocks, told[-1], seconds)
                self._station.post(event)
            self._told_layers = num_layers

    def doubt(self) -> None:
        """Not all that was granted will be here."""
        self._gate.break_off()

    def end(self, ended: FetchEnded) -> None:
        """It has been told."""
        self._gate.end(not ended.error and ended.num_blocks == self._num_blocks)

    def _all_granted(self) -> int | None:
        """Blocks from the first on, up to the first that is not lent; None: not known yet."""
        total = 0
        for asked, granted in zip(self._asked, self._granted, strict=True):
            if granted is None:
                return None
            total += granted
            if granted < asked:
                break
        return total

    def _whole_layers(self) -> int:
        """That have arrived of every part that counts."""
        least = self._station.arena.layout.num_layers
        for asked, granted, layers in zip(self._asked, self._granted, self._layers, strict=True):
            if granted:
                least = min(least, layers)
            if granted != asked:
                break
        return least

"""Streams that run during a fault: their outcomes, and how soon a new request gets a correct
answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec

from moonpool.distributions import interpolated

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=128,vocab=300"
SIZES = ("--kv-tokens", "8192", "--block-size", "16", "--admission", "none")
RECOVERY_S = 60.0


class FaultStreams:
    """Streams against one server: their outcomes, and the right answers to compare with."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.count = count
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.expected = [self._ask(number)[1] for number in range(count)]

    @staticmethod
    def body(number: int) -> dict[str, Any]:
        return {
            "prompt": [number + 5] * 40 + [7 + number] * 30,
            "max_tokens": 160,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def _ask(self, number: int) -> tuple[str, str]:
        """Returns (outcome, text) of one streamed answer."""
        text, finished = "", False
        try:
            with httpx.stream(
                "POST",
                f"{self.url}/v1/completions",
                json=self.body(number),
                timeout=RECOVERY_S,
            ) as answer:
                if answer.status_code != 200:
                    return "refused", ""
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = msgspec.json.decode(line[6:])
                    for choice in event.get("choices") or ():
                        text += choice["text"]
                        finished |= choice["finish_reason"] is not None
        except httpx.TimeoutException:
            return "hung", text
        except httpx.HTTPError:
            return "cut", text
        return ("whole" if finished else "cut"), text

    def probe(self) -> bool:
        return self._ask(0) == ("whole", self.expected[0])

    def run(self, number: int) -> None:
        outcome, text = self._ask(number)
        if outcome == "whole":
            outcome = "right" if text == self.expected[number] else "wrong"
        with self._lock:
            self.seen[outcome] += 1

    def disturbed(self, inject: Callable[[], None], wait_s: float) -> float | None:
        """Runs all streams, injects after `wait_s`; returns seconds to recovery, or None."""
        threads = [threading.Thread(target=self.run, args=(n,)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        time.sleep(wait_s)
        inject()
        injected_s = time.monotonic()
        recovered_s = None
        while recovered_s is None and time.monotonic() - injected_s < RECOVERY_S:
            if self.probe():
                recovered_s = time.monotonic() - injected_s
            else:
                time.sleep(0.05)
        for thread in threads:
            thread.join()
        return recovered_s


def fault_row(
    name: str, promised: str, recoveries: list[float | None], seen: Mapping[str, int]
) -> dict[str, Any]:
    known = sorted(r for r in recoveries if r is not None)
    return {
        "fault": name,
        "promised": promised,
        "times": len(recoveries),
        "seen": dict(seen),
        "not_recovered": len(recoveries) - len(known),
        "recovery_s": known,
        "p50_s": interpolated(known, 0.5) if known else None,
        "p99_s": interpolated(known, 0.99) if known else None,
    }

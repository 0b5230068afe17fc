"""TTFT of one tenant's short calls, alone and beside the long answers of another.

    python -m benchmarks.short_beside_long [--seconds 75] [--answers 60] [--json FILE]

One prefill and one decode instance of the built-in model; nothing is refused for its TTFT, because
nobody states one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from moonpool.distributions.quantiles import nearest_rank
from moonpool_lab.demo.local_server import LocalServer

KEYS = "sk-long long\nsk-short short\n"
ALONE_S = 8.0
SETTLE_S = 8.0
LONG_TOKENS = 7000
SHORT_TOKENS = 8


def events(client: httpx.Client, key: str, prompt: str, max_tokens: int) -> Iterator[bool]:
    """Yields for each event of an answer. Raises httpx.HTTPError if there is none."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield True


def short_calls(url: str, seconds: float) -> tuple[list[float], int]:
    """Asks one after another; returns each TTFT, and how many calls had no answer."""
    found: list[float] = []
    failed = 0
    until_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.monotonic() < until_s:
            began_s, first_s = time.monotonic(), None
            try:
                name = f"short question {len(found) + failed} of it"
                for _ in events(client, "sk-short", name, SHORT_TOKENS):
                    first_s = first_s or time.monotonic() - began_s
            except httpx.HTTPError:
                failed += 1
                continue
            if first_s is not None:
                found.append(first_s)
    return found, failed


def long_answer(url: str, number: int, stop: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=600) as client:
        for _ in events(client, "sk-long", f"long story {number} goes on", LONG_TOKENS):
            if stop.is_set():
                return


def figures(ttfts: list[float], failed: int) -> dict[str, Any]:
    ordered = sorted(ttfts)
    return {
        "answered": len(ordered),
        "failed": failed,
        "mean_s": statistics.mean(ordered),
        "p50_s": statistics.median(ordered),
        "p90_s": nearest_rank(ordered, 0.9),
    }


def measure(seconds: float, num_answers: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of the short calls alone, and beside the long answers."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        flags = ["--prefill", "1", "--decode", "1", "--api-key-file", str(keys)]
        with LocalServer(flags) as server:
            alone = figures(*short_calls(server.url, ALONE_S))
            stop = threading.Event()
            threads = [
                threading.Thread(target=long_answer, args=(server.url, number, stop), daemon=True)
                for number in range(num_answers)
            ]
            for thread in threads:
                thread.start()
            time.sleep(SETTLE_S)
            beside = figures(*short_calls(server.url, seconds))
            stop.set()
            for thread in threads:
                thread.join(60)
    return {"alone": alone, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--json")
    given = parser.parse_args()
    found = measure(given.seconds, given.answers)
    for name, one in found.items():
        times = ", ".join(f"{key[:-2]} {1e3 * one[key]:.1f} ms" for key in one if key[-2:] == "_s")
        sys.stdout.write(f"{name}: {one['answered']} answered, {one['failed']} not; {times}\n")
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

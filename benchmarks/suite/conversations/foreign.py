"""Users of AIPerf, a load generator from outside, as the client.

The tool draws and sends sessions with the shared prefix, turns and lengths of a shape, in its
user-centric mode: each user waits for the answer before the next turn, and new users come at a
steady rate. The prompts are texts and pass the chat template.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.suite.conversations.basis import SessionBasis
from benchmarks.suite.conversations.sessions import SessionShape
from benchmarks.suite.live.vllm_client import run_client
from moonpool_lab.demo.local_server import ServerError

RESULT = "profile_export_aiperf.json"
GRACE_S = 20
LIMIT_S = 900.0


def aiperf_command(python: str) -> str:
    """Returns the command of that Python's installation. Raises ServerError."""
    command = Path(python).with_name("aiperf")
    if not command.exists():
        raise ServerError(f"there is no {command}: --aiperf-python must be that of an AIPerf")
    return str(command)


def run_aiperf(
    python: str,
    url: str,
    folder: str,
    shape: SessionShape,
    basis: SessionBasis,
    load: float,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Figures of one run under our names; `folder` has the tokeniser. Raises ServerError."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as place:
        whole = str(Path(folder).resolve())  # a relative path would be taken for an id of the hub
        words = arguments(url, model, whole, shape, basis, load, seconds, seed, place)
        # AIPerf takes a local folder for an id of the hub where these are set.
        unset = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {name: text for name, text in os.environ.items() if name not in unset}
        run_client("aiperf", [aiperf_command(python), "profile", *words], environment, LIMIT_S)
        found = next(iter(Path(place).rglob(RESULT)), None)
        if found is None:
            raise ServerError(f"aiperf left no {RESULT}")
        try:
            return aiperf_figures(msgspec.json.decode(found.read_bytes()), seconds)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ServerError(f"aiperf's {RESULT} is not as expected: {error!r}") from None


def arguments(
    url: str,
    model: str,
    folder: str,
    shape: SessionShape,
    basis: SessionBasis,
    load: float,
    seconds: float,
    seed: int,
    place: str,
) -> list[str]:
    """Returns the arguments of `aiperf profile`. A user's turns are as far apart as an answer and a
    pause last."""
    rate_rps = load * basis.requests_per_s
    alone = next(iter(basis.alone.values()), basis.slo)
    cycle_s = shape.think_s + alone.ttft_s + shape.answer_tokens * alone.tbt_s
    options = {
        "--model": model,
        "--tokenizer": folder,
        "--url": url,
        "--endpoint-type": "chat",
        "--user-centric-rate": f"{rate_rps:g}",
        "--num-users": max(1, round(rate_rps * cycle_s)),
        "--session-turns-mean": shape.turns,
        "--shared-system-prompt-length": shape.shared_tokens,
        "--user-context-prompt-length": max(shape.opening_tokens - shape.turn_tokens, 0),
        "--isl": shape.turn_tokens,
        "--osl": shape.answer_tokens,
        "--extra-inputs": "ignore_eos:true",
        "--benchmark-duration": f"{seconds:g}",
        "--benchmark-grace-period": GRACE_S,
        "--goodput": (
            f"time_to_first_token:{1e3 * basis.slo.ttft_s:g}"
            f" inter_token_latency:{1e3 * basis.slo.tbt_s:g}"
        ),
        "--random-seed": seed,
        "--ui": "none",
        "--output-artifact-dir": place,
    }
    given = {name: value for name, value in options.items() if value != 0}
    return [*(str(word) for pair in given.items() for word in pair), "--streaming"]


def aiperf_figures(result: dict[str, Any], seconds: float) -> dict[str, Any]:
    """TBT is what AIPerf calls ITL: the mean gap of each answer. A refusal counts as failed."""

    def spread(name: str) -> dict[str, float]:
        return {p: result[name][p] / 1e3 for p in ("p50", "p90")}

    def count(name: str) -> int:
        return int((result.get(name) or {}).get("avg") or 0)

    completed, failed, effective = (
        count(name) for name in ("request_count", "error_request_count", "good_request_count")
    )
    # Both are means per answer, so their ratio equals the ratio of the sums.
    prompt, cached = (
        float((result.get(f"usage_prompt_{name}") or {}).get("avg") or 0.0)
        for name in ("tokens", "cache_read_tokens")
    )
    return {
        "requests": completed + failed,
        "completed": completed,
        "effective": effective,
        "goodput_rps": effective / seconds,
        "rejected": 0,
        "failed": failed,
        "missed_ttft": 0,
        "missed_tbt": 0,
        "prompt_tokens": round(prompt * completed),
        "hit_ratio": cached / prompt if prompt and cached else None,
        "ttft_s": spread("time_to_first_token"),
        "tbt_s": spread("inter_token_latency"),
    }

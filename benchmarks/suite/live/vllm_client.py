"""`vllm bench serve` as the client: a load generator from outside, with its timed traces.

Owns its command line and the reading of its result file. This client sends the rows' lengths, times
and shared prefixes, with tokens that it draws itself.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.suite.live.vllm_server import vllm_command, vllm_environment
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from moonpool.types import Slo
from moonpool_lab.demo.local_server import ServerError

LIMIT_S = 1800.0
PERCENTILES = (50, 90, 99)


def run_vllm_client(
    python: str,
    url: str,
    folder: str,
    rows: Sequence[TraceRow],
    block_tokens: int,
    slo: Slo,
    seed: int,
) -> dict[str, Any]:
    """Figures of one run; `folder` has the tokeniser. Raises ServerError, httpx.HTTPError."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as place:
        trace, result = Path(place) / "trace.jsonl", Path(place) / "result.json"
        write_trace(rows, trace)
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": model,
            "--tokenizer": folder,
            "--dataset-name": "timed_trace",
            "--dataset-path": trace,
            "--timed-trace-chunk-hash-size": block_tokens,
            "--timed-trace-sec-multiplier": 0.001,
            "--num-prompts": len(rows),
            "--temperature": 0,
            "--percentile-metrics": "ttft,tpot,itl",
            "--metric-percentiles": ",".join(map(str, PERCENTILES)),
            "--result-dir": place,
            "--result-filename": result.name,
        }
        words = [str(word) for pair in options.items() for word in pair]
        words += ["--goodput", f"ttft:{1e3 * slo.ttft_s}", f"tpot:{1e3 * slo.tbt_s}"]
        words += ["--save-result", "--disable-tqdm"]
        # It seeds a block's tokens by `hash`: so all servers get the same tokens, and each seed
        # gives others.
        environment = vllm_environment(python) | {"PYTHONHASHSEED": str(seed)}
        command = [vllm_command(python), "bench", "serve", *words]
        run_client("vllm bench serve", command, environment, LIMIT_S)
        try:
            return client_figures(msgspec.json.decode(result.read_bytes()), len(rows))
        except (OSError, msgspec.DecodeError, KeyError) as error:
            raise ServerError(f"vllm bench serve left no result as expected: {error}") from None


def run_client(
    name: str, command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> None:
    """Runs a load generator from outside to its end. Raises ServerError."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"{name} did not end in {limit_s:.0f} s") from None
    if done.returncode:
        raise ServerError(f"{name} failed: {_reason(done.stdout + done.stderr)}")


def _reason(output: bytes) -> str:
    """The first line that it logged as an error, or its last one."""
    lines = output.decode(errors="replace").strip().splitlines()
    return next((line for line in lines if " ERROR " in line), (lines or ["it said nothing"])[-1])


def client_figures(result: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Returns the figures of `vllm bench serve` under moonpool's names. TBT (the time between two
    tokens) is the client's ITL."""

    def spread(name: str) -> dict[str, float]:
        found = {"mean": result[f"mean_{name}_ms"] / 1e3}
        return found | {f"p{p}": result[f"p{p}_{name}_ms"] / 1e3 for p in PERCENTILES}

    return {
        "requests": num_requests,
        "completed": result["completed"],
        "failed": result["failed"],
        "duration_s": result["duration"],
        "input_tokens": result["total_input_tokens"],
        "output_tokens": result["total_output_tokens"],
        "requests_per_s": result["request_throughput"],
        "output_tokens_per_s": result["output_throughput"],
        "tokens_per_s": result["total_token_throughput"],
        "goodput_rps": result["request_goodput"],
        "ttft_s": spread("ttft"),
        "tpot_s": spread("tpot"),
        "tbt_s": spread("itl"),
    }

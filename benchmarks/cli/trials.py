"""`moonpool bench trials`: the trial of moonpool and of others, in one table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import uvloop

from benchmarks.cli.annotated import KeptFile, PeerPython, options
from benchmarks.cli.output import measure
from moonpool.cli.output import check_folders, fail

SYSTEM_NAMES = ("moonpool", "vllm", "vllm-offload", "vllm-lmcache", "vllm-mooncake", "llama.cpp")


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@options
def trials(
    *,
    systems: Annotated[
        tuple[Any, ...],
        "Systems to try; repeat for more. All unless given.",
        "--system",
        click.Choice(SYSTEM_NAMES),
    ] = SYSTEM_NAMES,
    peer_python: PeerPython = "",
    llama_python: Annotated[str, "Python with llama-cpp-python[server]."] = "",
    gguf: Annotated[str, "GGUF file of the same model, for llama.cpp."] = "",
    peer_cores: Annotated[str, "Cores of vLLM."] = "0-1",
    requests: Annotated[int, "Questions asked under load."] = 400,
    concurrency: Annotated[int, "Requests in flight."] = 16,
    families: Annotated[int, "Families of conversations."] = 6,
    seconds: Annotated[float, "Most seconds of load per system."] = 600.0,
    timeout_s: Annotated[float, "Of one answer.", "--timeout"] = 60.0,
    seed: Annotated[int, "Seed of the prompts.", click.INT] = 0,
    model: Path,
    json_file: KeptFile = None,
) -> None:
    """Try moonpool, vLLM with and without stores, and llama.cpp for wrong answers. MODEL is a
    checkpoint's folder."""
    from benchmarks.suite.live.trials import TrialTargets, added_to, bench_trials
    from moonpool_lab.cli.trial import trial_lines
    from moonpool_lab.trial.run import TrialPlan, run_trial

    targets = TrialTargets(str(model.resolve()), gguf, peer_python, llama_python, peer_cores)

    def try_one(url: str, may_reset: bool) -> dict[str, Any]:
        plan = TrialPlan(
            url=url,
            may_reset=may_reset,
            requests=requests,
            concurrency=concurrency,
            families=families,
            seconds=seconds,
            timeout_s=timeout_s,
            seed=seed,
        )
        return uvloop.run(run_trial(plan))

    check_folders(json_file)
    file = None if json_file is None else Path(json_file)
    kept = json.loads(file.read_text()) if file is not None and file.is_file() else {}

    def run() -> dict[str, Any]:
        tell = partial(click.echo, err=True)
        return added_to(kept, bench_trials(targets, systems, try_one, tell))

    found = measure(run, json_file)
    if not found["servers"]:
        fail("no system could be started: " + "; ".join(found["absent"].values()))
    for line in trial_lines([figures | {"url": n} for n, figures in found["servers"].items()]):
        click.echo(line)
    for name, why in found["absent"].items():
        click.echo(f"{name}: left out: {why}")

"""`moonpool bench trials`: the trial of moonpool and of others, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moonpool.cli.options import COUNT, POSITIVE, json_option
from moonpool.cli.output import fail, run_measurement

SYSTEM_NAMES = ("moonpool", "vllm", "vllm-offload", "vllm-lmcache", "vllm-mooncake", "llama.cpp")


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice(SYSTEM_NAMES),
    default=SYSTEM_NAMES,
    help="Systems to try; repeat for more. All unless given.",
)
@click.option("--peer-python", default="", help="Python of a vLLM installation.")
@click.option("--llama-python", default="", help="Python with llama-cpp-python[server].")
@click.option("--gguf", default="", help="GGUF file of the same model, for llama.cpp.")
@click.option("--peer-cores", default="0-1", show_default=True, help="Cores of vLLM.")
@click.option(
    "--requests", type=COUNT, default=400, show_default=True, help="Questions asked under load."
)
@click.option(
    "--concurrency", type=COUNT, default=16, show_default=True, help="Requests in flight."
)
@click.option(
    "--families", type=COUNT, default=6, show_default=True, help="Families of conversations."
)
@click.option(
    "--seconds",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Most seconds of load per system.",
)
@click.option(
    "--timeout", "timeout_s", type=POSITIVE, default=60.0, show_default=True, help="Of one answer."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@json_option
def trials(
    model: Path,
    systems: tuple[Any, ...],
    peer_python: str,
    llama_python: str,
    gguf: str,
    peer_cores: str,
    json_file: str | None,
    **given: Any,
) -> None:
    """Try moonpool, vLLM with and without stores, and llama.cpp for wrong answers. MODEL is a
    checkpoint's folder."""
    from benchmarks.suite.live.trials import TrialTargets, bench_trials
    from moonpool.cli.trial import trial_lines
    from moonpool.profiling.live_cluster import run_on_uvloop
    from moonpool.trial.run import TrialPlan, run_trial

    targets = TrialTargets(str(model.resolve()), gguf, peer_python, llama_python, peer_cores)

    def try_one(url: str, may_reset: bool) -> dict[str, Any]:
        return run_on_uvloop(run_trial(TrialPlan(url=url, may_reset=may_reset, **given)))

    found = run_measurement(
        lambda: bench_trials(targets, systems, try_one, lambda text: click.echo(text, err=True)),
        json_file,
    )
    if not found["servers"]:
        fail("no system could be started: " + "; ".join(found["absent"].values()))
    for line in trial_lines([figures | {"url": n} for n, figures in found["servers"].items()]):
        click.echo(line)
    for name, why in found["absent"].items():
        click.echo(f"{name}: left out: {why}")

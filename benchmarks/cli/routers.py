"""`moonpool bench routers`: the same instances behind round robin, vllm-router, Ray Serve's routers
and moonpool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.annotated import KeptFile, Rounds, Seed, options
from benchmarks.cli.live import NUMBERS
from benchmarks.cli.output import measure
from benchmarks.suite.routers.engines import STUB_MODEL, EngineFleet
from benchmarks.suite.routers.fronts import FRONT_NAMES
from benchmarks.suite.routers.workloads import WORKLOADS
from moonpool.cli.output import check_folders, origin


@click.command()
@options
def routers(
    *,
    model: Annotated[
        str, "Model of the instances; with --vllm-python, a checkpoint's folder."
    ] = "",
    vllm_python: Annotated[
        str, "Python of a vLLM installation; without, stubs with a model of time stand for vLLMs."
    ] = "",
    router_python: Annotated[str, "Python of an installation of vllm-router."] = "",
    ray_python: Annotated[
        str, "Python of an installation of ray[serve]; with moonpool, for its Conductor there."
    ] = "",
    speeds: Annotated[
        Any, "Instances: how slow each is, 1 for one as fast as can be. vLLMs are alike.", NUMBERS
    ] = "1,1,1",
    workloads: Annotated[
        tuple[Any, ...],
        "Workloads to play; repeat for more.",
        "--workload",
        click.Choice(tuple(WORKLOADS)),
    ] = tuple(WORKLOADS),
    only: Annotated[
        tuple[Any, ...],
        "Routers to run; repeat for more. All unless given.",
        "--router",
        click.Choice(FRONT_NAMES),
    ] = (),
    loads: Annotated[
        Any, "Loads to run, as multiples of the capacity, which is measured first.", NUMBERS
    ] = "0.5,0.8,1,1.5,2",
    seconds: Annotated[float, "Seconds in which requests of one run are sent."] = 30.0,
    kv_tokens: Annotated[int, "Tokens of KVCache of each instance."] = 32_768,
    step_tokens: Annotated[
        int, "Most tokens of one step (the prefill chunk).", "--max-num-batched-tokens"
    ] = 512,
    rounds: Rounds = 5,
    seed: Seed = 1,
    again: Annotated[bool, "Repeat runs that the file has already."] = False,
    json_file: KeptFile = None,
) -> None:
    """Compare routers in front of the same vLLMs, or stubs of them, from light load to overload."""
    from benchmarks.suite.routers.bench import RouterPlan, bench_routers, router_runs
    from benchmarks.suite.routers.fronts import FrontPythons

    if bool(vllm_python) > bool(model):
        raise click.UsageError("--vllm-python needs --model, the folder of a checkpoint")
    check_folders(json_file)
    plan = RouterPlan(
        fleet=_fleet(model, vllm_python, tuple(speeds), kv_tokens, step_tokens),
        pythons=FrontPythons(router=router_python, ray=ray_python),
        workloads=tuple(WORKLOADS[name] for name in workloads),
        routers=only or FRONT_NAMES,
        loads=tuple(sorted(loads)),
        rounds=rounds,
        seconds=seconds,
        seed=seed,
        again=again,
    )
    runs_file = Path(json_file) if json_file else None

    def run() -> dict[str, Any]:
        return bench_routers(plan, router_runs(runs_file, plan.fleet, origin()), click.echo)

    measure(run, None)


def _fleet(
    model: str, vllm_python: str, speeds: tuple[float, ...], kv_tokens: int, step_tokens: int
) -> EngineFleet:
    """Returns a fleet whose context holds the longest session of any workload."""
    return EngineFleet(
        model=model or STUB_MODEL,
        vllm_python=vllm_python,
        speeds=speeds,
        kv_tokens=kv_tokens,
        step_tokens=step_tokens,
        longest_tokens=max(workload.longest_tokens for workload in WORKLOADS.values()) + 256,
    )

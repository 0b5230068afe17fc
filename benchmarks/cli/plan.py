"""`bench plan`: what `moonpool plan` names, beside an exhaustive search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.annotated import options
from moonpool.cli.options import json_option
from moonpool.cli.output import fail, origin, write_json


@click.command()
@options
@json_option
def plan(
    *,
    numbers: Annotated[
        tuple[int, ...],
        "Only the workload with this number, from 1 on; repeat for more.",
        "--workload",
    ] = (),
    requests: Annotated[int, "Requests of each workload."] = 160,
    nodes: Annotated[int, "Most instances that are searched."] = 8,
    audits: Annotated[
        int,
        "Simulate this many of the candidates that were excluded without a simulation.",
        click.IntRange(min=0),
    ] = 4,
    json_file: str | None,
) -> None:
    """Plan 12 generated workloads, and search all cheaper clusters exhaustively. Takes an hour.

    Keeps the workloads that are already in the JSON file, so that an interrupted run can continue.
    """
    from benchmarks.suite.cluster.plan_proof import prove
    from benchmarks.suite.cluster.plan_workloads import PROOF_WORKLOADS
    from moonpool.config.tables import ConfigError

    chosen = list(numbers or range(1, len(PROOF_WORKLOADS) + 1))
    if max(chosen) > len(PROOF_WORKLOADS):
        fail(f"--workload must be 1 to {len(PROOF_WORKLOADS)}")
    found = _found_before(json_file, requests, nodes)
    began = origin()  # origin of the running code, whatever happens to its files
    for number in chosen:
        workload = PROOF_WORKLOADS[number - 1]
        if workload.name in found:
            continue
        click.echo(f"{number}. {workload.name}")
        try:
            row = prove(workload, requests, nodes).run(
                audits, lambda text: click.echo(f"   {text}")
            )
        except ConfigError as error:
            fail(f"{workload.name}: {error}")
        found[workload.name] = row
        click.echo(f"   {_verdict(row)}")
        right = sum(one["right"] for one in found.values())
        figures = {"requests": requests, "nodes": nodes, "workloads": found, "right": right}
        write_json(json_file, figures | {"origin": began})
    click.echo(f"{sum(one['right'] for one in found.values())} of {len(found)} within 3 %")


def _verdict(row: dict[str, Any]) -> str:
    if row["named"] is None:
        return "no cluster was named"
    searched = f"{row['searched']}, audit: {row['audited_kept']} of {row['audited']} keep the SLOs"
    if row["right"]:
        return f"none is cheaper by more than 3 % ({searched})"
    return f"a cheaper one keeps the SLOs: {row['cheaper']} ({searched})"


def _found_before(json_file: str | None, requests: int, nodes: int) -> dict[str, dict[str, Any]]:
    """Returns the workloads of an earlier run with the same sizes."""
    import json

    if json_file is None or not Path(json_file).exists():
        return {}
    before = json.loads(Path(json_file).read_bytes())
    if (before.get("requests"), before.get("nodes")) != (requests, nodes):
        return {}
    found: dict[str, dict[str, Any]] = before.get("workloads", {})
    return found

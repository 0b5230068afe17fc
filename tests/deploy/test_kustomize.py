"""Tests the kustomize base: it equals the chart's objects, and kustomize accepts it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import ROOT
from tests.deploy.kustomize_base import BASE, base_files


def test_the_base_is_what_the_chart_renders() -> None:
    files = base_files()
    assert {path.name for path in BASE.glob("*.yaml")} == set(files)
    for name, text in files.items():
        assert (BASE / name).read_text() == text, "python -m tests.deploy.kustomize_base"


def typed() -> str:
    """Runs the lines of the page, with a command that prints the objects in place of the one that
    applies them."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    lines = page[page.index("cd deploy/kustomize/example") :].partition("\n```")[0].splitlines()
    assert "kubectl apply -k ." in lines, "the last but one that a reader types"
    return "\n".join(
        [line for line in lines if not line.startswith("kubectl")] + ["kubectl kustomize ."]
    )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_example(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy" / "kustomize", tmp_path / "deploy" / "kustomize")
    done = subprocess.run(
        ["bash", "-euc", typed()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in built} == {"llm"}
    sets = {e["metadata"]["name"]: e for e in built if e["kind"] == "StatefulSet"}
    assert sets["moonpool-decode"]["spec"]["replicas"] == 3
    (container,) = sets["moonpool-decode"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/moonpool:0.1.0"
    secrets = {each["metadata"]["name"] for each in built if each["kind"] == "Secret"}
    refs = [
        e["valueFrom"]["secretKeyRef"]["name"]
        for e in container["env"]
        if "valueFrom" in e and "secretKeyRef" in e["valueFrom"]
    ]
    assert set(refs) <= secrets, "the generated names reach the pods"

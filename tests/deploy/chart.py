"""Renders the Helm chart with Helm itself, and returns its objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "moonpool"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "llm"
Manifest = dict[str, Any]


def values_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def render(
    values: dict[str, Any], release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Manifest]:
    """Returns the objects. Skips the test without Helm; raises HelmError with Helm's message."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    found = [
        each
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
    ]
    return [each for each in found if each]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet", "DaemonSet")


def containers(workload: Manifest) -> list[Manifest]:
    """Returns the containers in the order in which they start."""
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()

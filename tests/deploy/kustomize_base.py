"""Writes `deploy/kustomize/base` from the chart: `python -m tests.deploy.kustomize_base`."""

from __future__ import annotations

import yaml

from tests.deploy.chart import ROOT, Manifest, render

BASE = ROOT / "deploy" / "kustomize" / "base"
HEAD = (
    "# From the Helm chart: `python -m tests.deploy.kustomize_base`. An overlay sets namespace,\n"
    "# image and replicas, and makes two Secrets: moonpool-cluster (secret) and moonpool-auth\n"
    "# (keys, admin-key). deploy/kustomize/example is one.\n"
)
VALUES = {
    "auth": {"existingSecret": "moonpool-auth"},
    "clusterSecret": {"existingSecret": "moonpool-cluster"},
}


def base_files() -> dict[str, str]:
    """Returns the text of each file of the base. Skips the test without Helm."""
    manifests = render(VALUES, release="moonpool", namespace="default")
    for manifest in manifests:
        _neutral(manifest)
    names = sorted({each["kind"].lower() for each in manifests})
    files = {f"{name}.yaml": "" for name in names}
    for name in names:
        docs = [each for each in manifests if each["kind"].lower() == name]
        files[f"{name}.yaml"] = yaml.safe_dump_all(docs, sort_keys=False, width=100)
    top = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    files["kustomization.yaml"] = yaml.safe_dump(top, sort_keys=False)
    return {name: HEAD + text for name, text in files.items()}


def _neutral(manifest: Manifest) -> None:
    """Omits the namespace, which the overlay gives, and the labels that name Helm as the
    manager."""
    manifest["metadata"].pop("namespace")
    places = [
        manifest["metadata"],
        manifest.get("spec", {}).get("template", {}).get("metadata", {}),
    ]
    for place in places:
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            place.get("labels", {}).pop(label, None)


def main() -> None:
    BASE.mkdir(parents=True, exist_ok=True)
    for name, text in base_files().items():
        (BASE / name).write_text(text)


if __name__ == "__main__":
    main()

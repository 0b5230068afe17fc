"""Tests that a vLLM with other modules, classes or objects is refused in one line, and continues to
serve."""

from __future__ import annotations

import enum
import logging
import sys
from abc import ABC
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moonpool_engine.vllm import entry
from moonpool_engine.vllm.known_interface import METHODS, REQUEST, TRIED
from moonpool_engine.vllm.transfers import RankReady, StepTransfers
from tests.unit.vllm_pool.cache_forms import one_group
from tests.unit.vllm_pool.test_known_interface import Metadata, base_class

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
SOURCES = "vllm.v1.metrics.cache_hit_source"
REQUESTS = "vllm.v1.request"
GROUPS = "vllm.distributed.parallel_state"
CONNECTOR = "moonpool_engine.vllm.connector"
GROUP = bytes(32)


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


def begin(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    self._vllm_config, self._kv_cache_manager = vllm_config, None


def bind(self: Any, kv_cache_manager: Any) -> None:
    self._kv_cache_manager = kv_cache_manager


def request_class(names: frozenset[str] = REQUEST) -> Any:
    found: dict[str, Any] = {}
    exec(f"def __init__(self, request_id, {', '.join(sorted(names))}): pass", found)
    return type("Request", (), {"__init__": found["__init__"]})


def modules_of_vllm() -> dict[str, dict[str, Any]]:
    """Lists the names that the connector takes from vLLM, by module."""
    base = base_class(__init__=begin, bind_kv_cache_manager=bind)
    base.__module__ = BASE
    metadata = {f"KVConnector{name}": Metadata for name in ("Metadata", "WorkerMetadata")}
    one = SimpleNamespace(world_size=1, is_last_rank=True)
    return {
        "vllm": {"__version__": "0.33.0"},
        BASE: {
            **metadata,
            "KVConnectorHandshakeMetadata": Metadata,
            "KVConnectorBase_V1": base,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": SimpleNamespace,
            "SupportsHMA": type("SupportsHMA", (ABC,), {}),
        },
        SOURCES: {"CacheHitSource": enum.Enum("CacheHitSource", ["HOST", "DISK"])},
        REQUESTS: {"Request": request_class()},
        GROUPS: {"get_tp_group": lambda: one, "get_pp_group": lambda: one},
    }


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the class of connectors in a vLLM of these modules."""

    def loaded(modules: dict[str, dict[str, Any]]) -> Any:
        for name in [one for one in sys.modules if one.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, content in modules.items():
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                whole = ".".join(parts[:count])
                if whole not in sys.modules:
                    module = ModuleType(whole)
                    module.__path__ = []
                    monkeypatch.setitem(sys.modules, whole, module)
                    if count > 1:
                        setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
            vars(sys.modules[name]).update(content)
        kind = entry.connector_class.__wrapped__()
        if CONNECTOR in sys.modules:
            monkeypatch.setattr(sys.modules[CONNECTOR], "_follow_vllm_logs", lambda: None)
        return kind

    logging.getLogger("vllm.moonpool").propagate = True
    sys.modules.pop(CONNECTOR, None)
    yield loaded
    sys.modules.pop(CONNECTOR, None)


def without(modules: dict[str, dict[str, Any]], module: str, name: str = "") -> None:
    if name:
        del modules[module][name]
    else:
        del modules[module]


def moved(modules: dict[str, dict[str, Any]]) -> None:
    """Gives the module of connectors another name."""
    name = "vllm.kv_connectors.base"
    modules[name] = modules.pop(BASE)
    modules[name]["KVConnectorBase_V1"].__module__ = name


def renamed(modules: dict[str, dict[str, Any]]) -> None:
    """Gives the class of connectors another name, too."""
    moved(modules)
    content = modules["vllm.kv_connectors.base"]
    content["KVConnectorBase"] = content.pop("KVConnectorBase_V1")


def one_more(modules: dict[str, dict[str, Any]]) -> None:
    """Gives the methods of connectors one more argument."""

    def begin_with(
        self: Any, vllm_config: Any, role: Any, kv_cache_config: Any, ranks: Any
    ) -> None:
        self.begun_with = ranks

    modules[BASE]["KVConnectorBase_V1"].__init__ = begin_with


def one_less(modules: dict[str, dict[str, Any]]) -> None:
    def begin_with(self: Any, vllm_config: Any, role: Any) -> None:
        self.begun_with = role

    modules[BASE]["KVConnectorBase_V1"].__init__ = begin_with


CHANGES: dict[str, tuple[Any, str]] = {
    "another module": (moved, "kv_transfer"),
    "another class": (renamed, "kv_transfer"),
    "no module of requests": (lambda m: without(m, REQUESTS), "request"),
    "no sources of hits": (lambda m: without(m, SOURCES), "vllm.v1.metrics"),
    "no source of hits": (lambda m: without(m, SOURCES, "CacheHitSource"), "CacheHitSource"),
    "no transfer results": (lambda m: without(m, BASE, "KVConnectorTransferResults"), "Results"),
    "no groups of KVCache": (lambda m: without(m, BASE, "SupportsHMA"), "SupportsHMA"),
    "no metadata": (lambda m: without(m, BASE, "KVConnectorMetadata"), "KVConnectorMetadata"),
    "one argument more": (one_more, "ranks"),
    "one argument less": (one_less, "__init__"),
    **{
        f"requests without {name}": (
            lambda m, name=name: m[REQUESTS].update(Request=request_class(REQUEST - {name})),
            name,
        )
        for name in sorted(REQUEST)
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_vllm_gets_a_connector_that_moves_nothing(
    change: str, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    modules = modules_of_vllm()
    act, named = CHANGES[change]
    act(modules)
    kind = load(modules)
    given = (None, Role.SCHEDULER, None, 4) if change == "one argument more" else ()
    scheduler = kind(*(given or (None, Role.SCHEDULER, None)))
    kind(None, Role.WORKER, *given[2:] or (None,))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("vLLM serves without the KVCache pool: vLLM 0.33.0 ")
    assert named in line
    assert all(each in line for each in TRIED)
    assert "\n" not in line
    assert scheduler.get_num_new_matched_tokens(None, 0) == (0, False)
    assert scheduler.request_finished(None, []) == (False, None)
    assert scheduler.build_connector_meta(None) is not None


def test_a_vllm_without_connectors_is_refused(load: Any) -> None:
    modules = modules_of_vllm()
    without(modules, BASE, "KVConnectorBase_V1")
    with pytest.raises(ImportError) as found:
        load(modules)
    assert "0.33.0" in str(found.value)
    assert "\n" not in str(found.value)


def config(**changes: Any) -> Any:
    found = {
        "kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"pool": "/nowhere/pool"}),
        "cache_config": SimpleNamespace(block_size=16),
        "parallel_config": SimpleNamespace(
            rank=0, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        "model_config": SimpleNamespace(enable_sleep_mode=False, model="m"),
    }
    return SimpleNamespace(**{k: v for k, v in (found | changes).items() if v is not None})


def test_this_vllm_is_known(load: Any) -> None:
    kind = load(modules_of_vllm())
    assert kind.__module__ == CONNECTOR
    assert METHODS.keys() <= set(dir(kind))


@pytest.mark.parametrize(
    ("caches", "changes", "named"),
    [
        (lambda own: list(own.values()), {}, "a list"),
        (lambda own: torch.stack(list(own.values())), {}, "a Tensor"),
        (lambda own: {name: [one] for name, one in own.items()}, {}, "has list as its cache"),
        (lambda own: {name: {"k": one} for name, one in own.items()}, {}, "has dict as its cache"),
        (lambda own: {name: (one, one) for name, one in own.items()}, {}, "has tuple as its cache"),
        (lambda own: dict(enumerate(own.values())), {}, "no KVCache"),
        (lambda own: {}, {}, "no KVCache tensor"),
        (dict, {"parallel_config": None}, "parallel_config"),
        (dict, {"model_config": None}, "model_config"),
        (dict, {"cache_config": None}, "cache_config"),
        (dict, {}, "the layout could not be proven"),  # no worker has proven the layout
    ],
)
def test_a_worker_with_other_objects_refuses(
    caches: Any, changes: dict[str, Any], named: str, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    form = one_group()
    worker = load(modules_of_vllm())(config(**changes), Role.WORKER, form.config)
    worker.register_kv_caches(caches(form.kv_caches))
    ready = worker.get_handshake_metadata()
    assert ready.group == b""
    assert named in ready.refusal
    assert not caplog.records
    scheduler = scheduler_of(type(worker), ready)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"vLLM serves without the KVCache pool: {ready.refusal}"
    assert "\n" not in line
    assert serves_on(scheduler)


def scheduler_of(kind: Any, ready: Any = None, **changes: Any) -> Any:
    scheduler = kind(config(**changes), Role.SCHEDULER, None)
    scheduler.bind_kv_cache_manager(SimpleNamespace(block_pool=None))
    scheduler.set_xfer_handshake_metadata({0: ready or RankReady(GROUP, 0, 1)})
    return scheduler


def serves_on(scheduler: Any) -> bool:
    """Whether the scheduler serves a request without the pool."""
    request = SimpleNamespace(request_id="r", num_tokens=40, all_token_ids=[0] * 40)
    scheduler.on_new_request(request)
    nothing = scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    output = SimpleNamespace(num_scheduled_tokens={"r": 40}, total_num_scheduled_tokens=40)
    step = scheduler.build_connector_meta(output)
    assert isinstance(step, StepTransfers)
    return nothing and not step.loads and not step.stores


@pytest.mark.parametrize("ready", [object(), {"group": GROUP}])
def test_a_scheduler_that_hears_otherwise_serves_on(
    ready: Any, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(load(modules_of_vllm()), ready)
    assert "without the KVCache pool" in caplog.text
    assert serves_on(scheduler)


def test_a_scheduler_with_another_configuration_serves_on(
    load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(load(modules_of_vllm()), cache_config=None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "its configuration" in line
    assert serves_on(scheduler)


@pytest.mark.parametrize("hook", ["on_new_request", "get_num_new_matched_tokens"])
def test_a_request_that_is_otherwise_ends_the_use_of_the_pool(
    hook: str, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(load(modules_of_vllm()))
    try:
        other = SimpleNamespace(id="r")
        if hook == "on_new_request":
            scheduler.on_new_request(other)
        else:
            assert scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        lines = [r.getMessage() for r in caplog.records if "a request" in r.getMessage()]
        assert len(lines) == 1
        assert "request_id" in lines[0]
        assert serves_on(scheduler)
        assert len([r for r in caplog.records if "a request" in r.getMessage()]) == 1
    finally:
        scheduler.shutdown()

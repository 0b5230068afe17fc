"""Tests that the connector refuses an unknown vLLM in one line, and that vLLM serves without the
pool."""

from __future__ import annotations

import ast
import enum
import inspect
import logging
from abc import ABC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool_engine.vllm import known_interface
from moonpool_engine.vllm.idle_connector import idle_connector
from moonpool_engine.vllm.known_interface import METHODS, REQUEST, TRIED
from moonpool_engine.vllm.known_interface import why_unknown as why_unknown_of

ABSTRACT = {"build_connector_meta", "get_num_new_matched_tokens", "start_load_kv"}


class Metadata(ABC):  # noqa: B024 - as vLLM's
    pass


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


def base_class(**changes: Any) -> Any:
    """Makes a class of connectors like vLLM's own, with other methods where `changes` has them."""
    methods = {name: method(parameters) for name, parameters in METHODS.items()}
    for name in ABSTRACT:
        methods[name].__isabstractmethod__ = True
    methods |= changes
    return type(ABC)("KVConnectorBase_V1", (ABC,), {k: v for k, v in methods.items() if v})


def method(parameters: tuple[str, ...]) -> Any:
    def called(*_: Any, **__: Any) -> None:
        return None

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [inspect.Parameter(name, kind) for name in parameters]
    called.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return called


class Request:
    def __init__(self, request_id, **_):  # type: ignore[no-untyped-def]
        pass

    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(REQUEST)]
    )


def why_unknown(version: str, base: Any) -> str:
    return why_unknown_of(version, base, Request)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cpu", "0.33.1rc1.dev3+gabc"])
def test_versions_that_were_tried_are_known(version: str) -> None:
    assert why_unknown(version, base_class()) == ""


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3.3", "1.0", "dev", "0.333.0"])
def test_another_version_is_refused_by_its_name(version: str) -> None:
    said = why_unknown(version, base_class())
    assert version in said
    assert all(each in said for each in TRIED)
    assert "\n" not in said


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_gone_or_other_is_refused(name: str) -> None:
    other = method((*METHODS[name], "more"))
    changed = why_unknown("0.33.0", base_class(**{name: other}))
    assert name in changed
    assert "more" in changed
    if name != "__init__":  # left out, because every class has an __init__
        assert f"no {name}" in why_unknown("0.33.0", base_class(**{name: None}))
    assert "\n" not in changed


def test_a_method_that_must_be_there_and_is_not_known_is_refused() -> None:
    new = method(("self",))
    new.__isabstractmethod__ = True
    assert "send_blocks" in why_unknown("0.33.0", base_class(send_blocks=new))


def test_all_methods_that_the_connector_takes_over_are_looked_at() -> None:
    source = Path(known_interface.__file__).with_name("connector.py").read_text()
    (connector,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    own = {f.name for f in connector.body if isinstance(f, ast.FunctionDef)}
    private = {name for name in own if name.startswith("_") and name != "__init__"}
    # It is a property of SupportsHMA, from 0.33 on.
    apart = {"requires_kv_delivery", "request_finished_all_groups", "unregister_kv_caches"}
    assert own - private - apart <= METHODS.keys()


def test_the_connector_that_moves_nothing_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    new = method(("self",))
    new.__isabstractmethod__ = True
    module = SimpleNamespace(
        KVConnectorMetadata=Metadata, KVConnectorBase_V1=base_class(send_blocks=new)
    )
    kind = idle_connector(module, "vLLM 0.99 is not known")
    logging.getLogger("vllm.moonpool").propagate = True
    scheduler, worker = (kind(None, role, None) for role in (Role.SCHEDULER, Role.WORKER))
    assert [r.getMessage() for r in caplog.records] == [
        "vLLM serves without the KVCache pool: vLLM 0.99 is not known"
    ]
    assert scheduler.get_num_new_matched_tokens(None, 5) == (0, False)
    assert scheduler.request_finished(None, [1]) == (False, None)
    assert isinstance(scheduler.build_connector_meta(None), Metadata)
    assert worker.start_load_kv(None) is None
    assert worker.send_blocks() is None

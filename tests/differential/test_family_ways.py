"""Tests that the table in `docs/models.md` of the families and the ways to serve them is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import make_layout
from tests.differential.checkpoints import CASES, Case
from tests.live.family_checkpoints import CASE_OF, refusal, write

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LATE: dict[str, Any] = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
MORE = (Case("Qwen3", LATE), Case("Qwen3Moe", {**CASES["qwen3-moe"].changes, **LATE}))
"""Lists properties that families may have in addition, such as windows, without a case of their
own."""


def table() -> dict[str, dict[str, str]]:
    """Maps a family to a map from way to cell."""
    lines = PAGE.read_text().split("<!-- families x ways -->")[1].strip().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def cell(refusals: set[str]) -> str:
    """Returns the table's cell for a family with these refusals; "" means that the way serves the
    family."""
    assert len({bool(one) for one in refusals}) == 1, refusals
    return "no" if all(refusals) else "yes"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LoadedModel]]:
    """Returns all cases of each family."""
    found: dict[str, list[LoadedModel]] = {}
    for family, chosen in CASE_OF.items():
        cases = [case for case in (*CASES.values(), *MORE) if case.family == chosen.family]
        for case in cases:
            folder = tmp_path_factory.mktemp(family)
            write(family, folder, case)
            found.setdefault(family, []).append(open_model(str(folder), "float32"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_what_the_code_refuses(
    models: dict[str, list[LoadedModel]], family: str
) -> None:
    stated = table()[family]
    assert list(stated) == ["cache, P/D, SSD, stages", "ranks", "attention workers", "fp8 KVCache"]
    for way in ("ranks", "attention workers"):
        assert stated[way] == cell({refusal(model, way) for model in models[family]}), way
    fp8 = {_of_fp8(model) for model in models[family]}
    assert stated["cache, P/D, SSD, stages"] == "yes"
    assert stated["fp8 KVCache"] == cell(fp8)


def _of_fp8(model: LoadedModel) -> str:
    try:
        make_layout(replace(model, kv_dtype="fp8"), 64, ReferenceOps())
    except ValueError as error:
        return str(error)
    return ""


def test_the_table_has_every_family() -> None:
    assert list(table()) == list(FAMILIES)

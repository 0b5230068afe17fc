"""Tests the output in notebooks, and that the documentation's notebook has the output of its
cells."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest

import moonpool
from moonpool.studies.progress_line import ProgressLine
from moonpool.studies.result_table import ResultTable
from website.notebook import NOTEBOOKS, executed, text_of

ROWS = [moonpool.TraceRow(2.0 * i, 2048, 8) for i in range(20)]


@pytest.mark.long
def test_the_notebook_has_what_its_cells_give() -> None:
    """The notebook must be up to date; `make notebook` writes it again."""
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert text_of(executed(notebook)) == path.read_text(), f"run make notebook for {path.name}"


def test_results_show_themselves(tmp_path: Path) -> None:
    run = moonpool.simulate(ROWS, mixed=1)
    assert "within both SLOs" in run._repr_html_() and "20 of 20, 100.0%" in run._repr_html_()
    assert "and 10 more rows" in run.requests._repr_html_()
    for what in ("ttft", "tbt", "requests"):
        run.plot(what).save(tmp_path / "plot.svg")
        assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match="there is no plot 'all'"):
        run.plot("all")
    text = ResultTable({"<b>": ["<i>", None]})._repr_html_()
    assert "&lt;i&gt;" in text and "<i>" not in text and "<b>" not in text


def test_the_line_of_progress_is_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(None) as line:
        line.show(0.5, "half")
    assert capsys.readouterr().err == "", "this is no notebook"
    with ProgressLine(True) as line:
        line.show(0.5, "half")
    shown = capsys.readouterr().err
    assert "[##########          ] half" in shown and shown.endswith(" \r")


def test_a_notebook_shows_the_line_as_an_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, bool, str]] = []

    def display(shown: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        calls.append((shown["text/plain"], update, display_id))

    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with ProgressLine(None) as line:
        line.show(0.5, "half")
    assert [(text[-4:], update) for text, update, _ in calls] == [("half", False), ("", True)]
    assert len({name for *_, name in calls}) == 1 and capsys.readouterr().err == ""


def test_a_simulation_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    silent = moonpool.simulate(ROWS, mixed=1)
    assert capsys.readouterr().err == "", "this is no notebook"
    shown = moonpool.simulate(ROWS, mixed=1, progress=True)
    assert "simulated 0 of 20 requests" in capsys.readouterr().err
    assert shown.summary["ttft_s"] == silent.summary["ttft_s"]


@pytest.mark.long
def test_a_table_is_written_by_its_name(tmp_path: Path) -> None:
    table = ResultTable({"a": [1, 2], "b": ["x", None]})
    table.write(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().split() == ["a,b", "1,x", "2,"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table.write(tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").to_pydict() == table.columns

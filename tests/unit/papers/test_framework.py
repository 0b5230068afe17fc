"""Tests the common parts of all experiments: verdicts, the registry, traces, the command and its
files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from papers import registry
from papers.command import reproduce
from papers.draw import draw
from papers.finding import Check, Finding, FindingRow, figures
from papers.options import ExperimentError, MissingTraceError, Options
from papers.plot import Panel, PlotSeries, bars
from papers.registry import EXPERIMENTS, find, run


def finding(name: str = "made-up") -> Finding:
    panel = Panel(
        "bars and a curve",
        "kind",
        "time (s)",
        (bars("theirs", "paper", {"a": 1.0}), bars("ours", "ours", {"a": 1.1, "b": 2.0})),
    )
    curve = Panel(
        "curves",
        "t (s)",
        "load",
        (
            PlotSeries("one", "paper", "line", (1.0, 2.0), (3.0, 4.0)),
            PlotSeries("two", "ours", "steps", (1.0, 2.0), (1.0, 2.0)),
            PlotSeries("three", "ours", "points", (1.0, 2.0), (1.5, 2.5)),
        ),
        log_y=True,
    )
    rows = (FindingRow("a", "s", 1.0, 1.05), FindingRow("b", "s", None, 2.0 / 3.0, "why"))
    return Finding(
        name,
        "Made up",
        "nowhere",
        ("x",),
        ("y",),
        rows,
        (Check("c", True),),
        ("n",),
        (panel, curve),
    )


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (10.0, 10.9, "within 10 %"),
        (10.0, 9.1, "within 10 %"),
        (10.0, 12.4, "within 25 %"),
        (10.0, 19.0, "same order"),
        (10.0, 5.2, "same order"),
        (10.0, 21.0, "does not follow"),
        (10.0, -10.0, "does not follow"),
        (0.0, 0.0, "within 10 %"),
        (0.0, 1.0, "does not follow"),
        (None, 1.0, "ours alone"),
    ],
)
def test_verdicts(paper: float | None, ours: float, verdict: str) -> None:
    assert FindingRow("x", "s", paper, ours).verdict == verdict


def test_the_difference_is_a_share_of_the_papers() -> None:
    assert FindingRow("x", "s", 4.0, 5.0).difference == pytest.approx(0.25)
    assert FindingRow("x", "s", None, 5.0).difference is None
    assert FindingRow("x", "s", 0.0, 5.0).difference is None


def test_figures_are_rounded_and_carry_their_verdict() -> None:
    rows = figures(finding())["rows"]
    assert rows[1] == {
        "label": "b",
        "unit": "s",
        "paper": None,
        "ours": 0.666667,
        "difference": None,
        "verdict": "ours alone",
        "note": "why",
    }


def test_every_experiment_of_the_registry_has_its_module() -> None:
    folder = Path(registry.__file__).parent
    for name, experiment in EXPERIMENTS.items():
        assert folder.joinpath(*experiment.module.split(".")).with_suffix(".py").is_file(), name
        assert experiment.title and experiment.source


def test_unknown_names_lead_to_the_nearest() -> None:
    with pytest.raises(ExperimentError, match="did you mean 'sarathi-decode-maximal'"):
        find("sarathi-decode-maxima")
    with pytest.raises(ExperimentError, match="--list"):
        run("zzzzzzzz", Options())


def test_a_trace_is_found_in_the_first_folder_that_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    (second / "conversation_trace.jsonl").write_text("{}\n")
    options = Options(folders=(first, second))
    assert options.find_trace("conversation") == second / "conversation_trace.jsonl"
    with pytest.raises(
        MissingTraceError, match="moonpool trace download mooncake-toolagent --to traces"
    ):
        options.find_trace("toolagent")


def test_a_named_trace_stands_for_all(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(MissingTraceError, match="--trace"):
        Options(trace=path).find_trace("conversation")
    path.write_text("{}\n")
    assert Options(trace=path).find_trace("toolagent") == path


def test_pictures_are_drawn_and_nothing_is_without_panels(tmp_path: Path) -> None:
    path = draw(finding(), tmp_path / "new")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = Finding("n", "t", "s", (), (), ())
    assert draw(empty, tmp_path) is None


def command(monkeypatch: pytest.MonkeyPatch, missing: bool = False) -> CliRunner:
    def fake(name: str, options: Options) -> Finding:
        if missing and name == "needs-trace":
            options.find_trace("conversation")
        options.progress("working")
        return finding(name)

    names = {name: registry.Experiment("x", "S", "T") for name in ("made-up", "needs-trace")}
    monkeypatch.setattr("papers.command.run", fake)
    monkeypatch.setattr("papers.command.find", find)
    for module in ("papers.command", "papers.registry"):
        monkeypatch.setattr(f"{module}.EXPERIMENTS", names)
    monkeypatch.delenv("MOONPOOL_TRACES", raising=False)
    return CliRunner()


def test_the_command_prints_draws_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["--plot", str(tmp_path / "p"), "--json", str(tmp_path / "f.json")]
    done = command(monkeypatch).invoke(reproduce, ["made-up", "--seed", "3", *files])
    assert done.exit_code == 0, done.output
    for word in ("within 10 %", "+5.0 %", "ours alone", "holds", "Note: n", "Chosen here"):
        assert word in done.output
    assert (tmp_path / "p" / "made-up.png").is_file()
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["seed"] == 3
    assert found["findings"][0]["name"] == "made-up"


def test_all_goes_on_without_a_trace_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, missing=True).invoke(reproduce, ["all"])
    assert done.exit_code == 1
    assert "Made up" in done.output
    assert "needs-trace was left out" in done.output
    assert "moonpool trace download mooncake-conversation" in done.output


def test_the_folder_of_the_environment_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = command(monkeypatch, missing=True)
    (tmp_path / "conversation_trace.jsonl").write_text("{}\n")
    monkeypatch.setenv("MOONPOOL_TRACES", str(tmp_path))
    assert runner.invoke(reproduce, ["needs-trace"]).exit_code == 0


@pytest.mark.parametrize("words", [["mad-up"], [], ["needs-trace", "--trace", "nowhere.jsonl"]])
def test_mistakes_end_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, missing=True).invoke(reproduce, words)
    assert done.exit_code == 1
    assert len(done.output.strip().splitlines()) == 1
    assert done.output.startswith("moonpool: ")


def test_the_list_names_every_experiment() -> None:
    done = CliRunner().invoke(reproduce, ["--list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in EXPERIMENTS)


def test_a_run_of_fewer_requests_has_no_verdicts() -> None:
    finding = registry.run("mooncake-layer-wise", Options(seed=0, quick=True))
    assert {row.verdict for row in finding.rows} <= {"withheld", "ours alone"}
    assert "no verdict" in finding.title
    whole = registry.run("mooncake-layer-wise", Options(seed=0))
    assert "withheld" not in {row.verdict for row in whole.rows}


def test_a_part_of_a_trace_gets_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without --quick, a file with the trace's name but too few requests must get no
    verdict."""

    def shortened(options: Options) -> Finding:
        options.check_whole("conversation", 12_031)
        options.check_whole("toolagent", 7)
        return finding()

    monkeypatch.setattr(
        registry.importlib, "import_module", lambda name: SimpleNamespace(run=shortened)
    )
    monkeypatch.setitem(registry.EXPERIMENTS, finding().name, registry.Experiment("x", "s", "t"))
    found = run(finding().name, Options())
    assert "7 requests stand for the 23,608 of the toolagent trace: no verdict" in found.title
    assert "conversation" not in found.title
    assert {row.verdict for row in found.rows} <= {"withheld", "ours alone"}
    assert all(check.partial for check in found.checks)

"""`moonpool config` writes a file that it reads back, and the reference page is current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import Result

from moonpool.cli.config import show
from moonpool.cli.config_text import VARIABLES, new_file, reference_page
from moonpool.cli.options import POLICY_KEYS, ConfigOption
from moonpool.cli.serve import HEAD_FLAGS, SERVE_FLAGS
from moonpool.cli.simulate import CLUSTER_DEFAULTS, SIMULATE_FLAGS
from moonpool.config.parse import parse_config
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from tests.cli_runner import invoke

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str) -> Result:
    return invoke("config", *words)


def test_the_reference_page_is_what_the_types_give() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == reference_page(), "run `moonpool config reference > docs/config.md`"


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    found = set()
    for path in (ROOT / "src" / "moonpool").rglob("*.py"):
        found |= set(re.findall(r'"(MOONPOOL_(?!BENCH_)[A-Z_]+)"', path.read_text()))
    assert found - {"MOONPOOL_COMPLETE"} <= {name for name, _ in VARIABLES}


@pytest.mark.parametrize("defaults", [Config(), CLUSTER_DEFAULTS])
def test_a_new_file_holds_every_default(defaults: Config) -> None:
    text = re.sub(r"^# (?=\w+ = )", "", new_file(defaults), flags=re.M)
    named = {f"{table}.{key}" for table, values in tomllib.loads(text).items() for key in values}
    unset = {
        name
        for name, field in schema_of(Config).items()
        if (value := getattr(getattr(defaults, field.table), field.key)) is None
        or (field.protects and value == "")
    }
    assert named == set(schema_of(Config)) - unset
    assert parse_config(text) == defaults
    assert parse_config(new_file(defaults)) == Config(), "as comments they change nothing"


def test_init_keeps_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "moonpool.toml"
    assert run("init", str(path)).exit_code == 0
    assert run("check", str(path)).exit_code == 0
    path.write_text("[cluster]\n")
    again = run("init", str(path))
    assert again.exit_code == 1 and "exists already" in again.output
    assert path.read_text() == "[cluster]\n"


def test_show_names_the_origin_of_each_value(tmp_path: Path) -> None:
    path = tmp_path / "moonpool.toml"
    path.write_text('[pool]\nblock_tokens = 32\neviction = "lru"\n[slo]\nttft_s = 2.0\n')
    shown = run("show", "m", "--config", str(path), "--eviction", "lfu", "--vllm", "http://h:1")
    assert shown.exit_code == 0, shown.output
    lines = {line.split(" = ")[0]: line for line in shown.output.splitlines() if " = " in line}
    assert lines["block_tokens"].split()[2:] == ["32", "#", "file"]
    assert lines["eviction"].split()[2:] == ['"lfu"', "#", "flag"]
    assert lines["placement"].endswith("# default")
    assert lines["kind"].split()[2:4] == ['"vllm"', "#"] and "follows" in lines["kind"]
    assert parse_config(shown.output) == parse_config(
        path.read_text(),
        {"pool": {"eviction": "lfu"}, "vllm": {"mixed": ("http://h:1",)}, "model": {"name": "m"}},
    )


def test_show_for_a_simulation_has_its_defaults() -> None:
    shown = run("show", "--simulation", "--device", "H100-SXM")
    assert shown.exit_code == 0, shown.output
    found = parse_config(shown.output)
    assert found.cluster == CLUSTER_DEFAULTS.cluster
    assert (found.hardware.cost, found.hardware.device) == ("roofline", "H100-SXM")
    assert found.engine.device == "cpu"
    refused = run("show", "--simulation", "--port", "1")
    assert refused.exit_code == 1 and "api.port" in refused.output


def test_show_hides_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONPOOL_API_KEY", "s3cret-3,s3cret-4")
    path = tmp_path / "moonpool.toml"
    path.write_text('[api]\napi_keys = ["s3cret-1"]\n')
    for words in (["--config", str(path)], ["--api-key", "s3cret-1"]):
        shown = run("show", *words)
        assert "s3cret" not in shown.output
        assert "api_keys: 1 (not shown), and 2 of MOONPOOL_API_KEY" in shown.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster]\nprefil = 2\n", "unknown key cluster.prefil; did you mean 'prefill'?"),
        ("[slo]\nttft_s = -1\n", "slo.ttft_s must be"),
        ("[slo\n", "not valid TOML"),
        ('[conductor]\nplacement = "no.such:Thing"\n', "no.such"),
        ('[api]\napi_key_file = "/none/keys"\n', "cannot read the API keys"),
        ('[api]\nssl_certfile = "/none/cert"\n', "/none/cert"),
        ('[model]\nchat_template = "/none/template"\n', "/none/template"),
    ],
)
def test_check_names_the_file_and_the_mistake(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "moonpool.toml"
    path.write_text(text)
    found = run("check", str(path))
    assert found.exit_code == 1
    assert words in found.output and str(path) in found.output
    assert found.output.count("\n") == 1


def test_a_flag_that_is_wrong_does_not_blame_the_file(tmp_path: Path) -> None:
    path = tmp_path / "moonpool.toml"
    path.write_text("[slo]\nttft_s = 1.0\n")
    found = run("show", "--config", str(path), "--slo-ttft", "-1")
    assert found.exit_code == 1 and str(path) not in found.output


def test_service_and_simulation_have_the_same_flags_for_policies() -> None:
    decided = {name for name in schema_of(Config) if name.startswith("conductor.")}
    decided -= {"conductor.autoscale_webhook", "conductor.seed"}
    assert decided <= set(POLICY_KEYS)
    for flags in (SERVE_FLAGS, HEAD_FLAGS, SIMULATE_FLAGS):
        assert set(POLICY_KEYS) | {"conductor.seed"} <= flags.keys


@pytest.mark.parametrize(
    ("words", "expected"), [("moonpool ser", "serve"), ("x serve --pl", "--placement")]
)
def test_the_shell_completes(words: str, expected: str) -> None:
    environment = {
        "_MOONPOOL_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "from moonpool.cli.main import main; main(prog_name='moonpool')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"plain,{expected}" in done.stdout.split(), done


def test_each_mistake_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[pool]\nblok = 1\nblock_tokens = "x"\n[slo]\nttft_s = -1\n')
    for words in (["config", "check", str(path)], ["simulate", "--trace", "t", "--config", path]):
        done = invoke(*words)
        lines = done.stderr.splitlines()
        assert done.exit_code == 1 and len(lines) == 3
        assert all(line.startswith(f"moonpool: {path}: ") for line in lines)


def test_a_mistake_of_a_flag_is_not_said_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[pool]\nblok = 1\n")
    words = ["simulate", "--trace", "t", "--config", str(path), "--slo-ttft", "-1"]
    lines = invoke(*words).stderr.splitlines()
    assert [line.startswith(f"moonpool: {path}: ") for line in lines] == [True, False]


def test_all_files_that_a_config_names_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[conductor]\nplacement = "nothing:Here"\n'
        '[api]\napi_key_file = "no.keys"\nssl_certfile = "no.pem"\n'
    )
    lines = run("check", str(path)).stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith(f"moonpool: {path}: ") for line in lines)
    for words in ("nothing", "no.keys", "no.pem"):
        assert sum(words in line for line in lines) == 1


def test_flags_come_in_the_order_of_the_configuration() -> None:
    names = [each.name for each in show.params if isinstance(each, ConfigOption)]
    fields = [each for key, each in schema_of(Config).items() if key != "hardware.device"]
    ordered = [each.flag[2:].replace("-", "_") for each in fields]
    assert len(names) > 50 and names == [name for name in ordered if name in names]

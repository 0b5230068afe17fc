"""Tests that every file in deploy/ can be parsed, and that moonpool accepts every command line in
them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from moonpool.cli.config_text import VARIABLES
from moonpool.cli.main import cli
from moonpool.cli.serve import HEAD_PORT

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONTAINER = DEPLOY / "container"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
EXTRAS = {"vllm": r"--vllm=", "epp": r"- epp\n"}
"""Maps an extra that a process of the chart needs to the pattern that shows the need."""
DRAIN_S = 25
"""The default of `--drain-seconds`. A program that stops moonpool must wait for longer."""


def parse(words: list[str]) -> click.Context:
    """Parses a command line like the command; raises click.UsageError."""
    name, *rest = [
        re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word).replace("${MOONPOOL_HEAD}", "10.0.0.1:8001")
        for word in words
    ]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command.make_context(name, rest)


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Returns a unit's sections; a key may occur several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            keys = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            keys.setdefault(key, []).append(value)
    return sections


def instructions() -> list[tuple[str, str]]:
    """Returns (keyword, rest) of each instruction of the Containerfile."""
    text = re.sub(r"^#.*\n", "", (CONTAINER / "Containerfile").read_text(), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_what_a_command_refuses_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["worker", "--role=prefill", "--head=h:1", "--no-such-flag"])
    with pytest.raises(click.UsageError):
        parse(["worker", "--role=cook", "--head=h:1"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_moonpool_accepts(path: Path) -> None:
    service = unit(path)["Service"]
    (line,) = service["ExecStart"]
    words = shlex.split(line.replace("%i", "decode").replace("%l", "host"))
    assert words[0].endswith("/moonpool")
    if "--config" in words:  # the administrator writes the file that --config names
        at = words.index("--config")
        assert words[at + 1].startswith("/etc/moonpool/")
        del words[at : at + 2]
    assert parse(words[1:]).command.name == words[1]
    assert service["User"] == ["moonpool"]
    assert int(service["TimeoutStopSec"][0]) > DRAIN_S
    assert service["Restart"] == ["always"]  # a worker ends with status 0 when its head stops
    assert service["KillMode"] == ["mixed"]  # a kill of the group would cut the drain short


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name.replace("@.", "@decode.")
    copy.write_text(path.read_text().replace("/usr/local/bin/moonpool", sys.executable))
    line = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    complaints = [each for each in done.stderr.splitlines() if copy.name in each]
    assert not complaints, done.stderr


def test_the_services_of_compose_are_a_cluster() -> None:
    services = COMPOSE["services"]
    roles = []
    for name, service in services.items():
        context = parse(service["command"])
        assert context.command.name == ("head" if name == "head" else "worker")
        roles.append(context.params.get("role"))
        assert service["restart"] == "unless-stopped"
        assert service["env_file"] == "cluster.env"
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S
        assert not any("SECRET" in word or "api-key" in word for word in service["command"])
    assert {"prefill", "decode"} <= set(roles)
    for name in set(services) - {"head"}:
        assert f"--head=head:{HEAD_PORT}" in services[name]["command"]
        assert services[name]["deploy"] == {"mode": "replicated", "replicas": 2}
    assert services["head"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_example_of_the_environment_has_known_variables_and_no_secret() -> None:
    text = (CONTAINER / "cluster.env.example").read_text()
    found = re.findall(r"^(?:# )?(MOONPOOL_\w+)=(.*)$", text, re.M)
    assert "MOONPOOL_CLUSTER_SECRET" in dict(found)
    assert set(dict(found)) <= {name for name, _ in VARIABLES}
    assert set(dict(found).values()) == {""}


def test_the_image_runs_moonpool_without_root_and_without_a_compiler() -> None:
    steps = instructions()
    last = max(number for number, (word, _) in enumerate(steps) if word == "FROM")
    final = steps[last:]
    users = [rest for word, rest in final if word == "USER"]
    assert users and users[-1].isdigit() and int(users[-1]) > 0
    entry = yaml.safe_load(dict(final)["ENTRYPOINT"])
    default = yaml.safe_load(dict(final)["CMD"])
    assert entry == ["moonpool"]
    parse(default)
    assert not any("g++" in rest for _, rest in final)
    assert any("moonpool_engine-" in rest for word, rest in final if word == "RUN")
    for word, rest in steps:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (DEPLOY.parent / source).exists(), source


def test_the_image_has_the_extras_of_what_the_chart_starts() -> None:
    """The image's smoke test would not notice a missing extra, because it runs in the tests'
    environment, which has all packages."""
    templates = (DEPLOY / "helm" / "moonpool" / "templates").glob("*.*")
    text = "".join(path.read_text() for path in templates)
    needed = {extra for extra, mark in EXTRAS.items() if re.search(mark, text)}
    assert needed == set(EXTRAS), "the chart starts no such process any more"
    (installs,) = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    found = re.search(r"\$\{wheel\}\[([\w,]+)\]", installs)
    assert found is not None and needed <= set(found[1].split(","))


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint")
def test_hadolint_accepts_the_containerfile() -> None:
    line = [str(HADOLINT), str(CONTAINER / "Containerfile")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


SBATCH = DEPLOY / "slurm" / "moonpool.sbatch"


def test_the_script_for_slurm_is_bash_that_starts_what_moonpool_accepts() -> None:
    done = subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    text = SBATCH.read_text().replace("\\\n", " ")
    lines = re.findall(r"^.*?\b(?<!#)moonpool ((?:head|worker) .*?) &", text, re.M)
    values = {"$model": "m", "$address": "h", "$host": "h", "$port": "1", "$head_port": "1"}
    values |= {"$role": "decode", "$SLURM_PROCID": "1", "$MOONPOOL_HEAD": "h:1"}
    for line in lines:
        words = []
        for word in shlex.split(line):
            for name in sorted(values, key=len, reverse=True):
                word = word.replace(name, values[name])
            words.append(word)
        parse(words)
    assert [line.split()[0] for line in lines] == ["head", "worker"]
    assert "--signal=B:TERM@60" in text, "more than the drain, before the job's time is up"

"""Tests that the replay of a log makes equal decisions, from the beginning and from a state in the
middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.conductor.actions import (
    InstanceJoined,
    InstanceLost,
    Reported,
    RequestArrived,
    Tick,
)
from moonpool.conductor.attempt_planner import Policies
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import ConductorConfig
from moonpool.plugins.policies import own_classes
from moonpool.protocol.messages import BlocksChanged
from moonpool.rewind.event_log import (
    MAGIC,
    EventLog,
    EventLogError,
    EventLogFile,
    decisions,
    read_events,
    read_file,
    write_file,
)
from moonpool.rewind.replay import Replay, trace_lines
from moonpool.rewind.snapshot import dump
from moonpool.sim import simulation
from moonpool.trace.reader import open_trace
from moonpool.types import InstanceId, Request, RequestId, SamplingParams
from tests.cli_runner import invoke, succeed
from tests.tidy.test_extending import EXAMPLES
from tests.unit.conductor.conductor_desk import Desk
from tests.unit.conductor.conductor_instances import info

RUNS = {
    "goodput": "--speed 12 --prefill 2 --decode 2 --slo-tbt 0.035",
    "faults": "--speed 8 --prefill 2 --decode 3 --restart prefill-0=20 --drain decode-1=15",
    "switch": "--role-balance switch --admission early --speed 8 --prefill 3 --decode 3",
    "reuse": "--kv-tokens 300000 --ssd-tokens 1000000 --prefill 2 --decode 2",
    "own": "--placement least_loaded:LeastLoaded --prefill 2 --decode 2",
}
QUICK = ("faults", "reuse", "own")


class Recorder:
    """Logs the events of each simulation's Conductor, like the head."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_segments = 0
        self.file = b""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handle, init, recorder = Conductor.handle, Conductor.__init__, self
        logs: dict[int, EventLog] = {}
        made: dict[int, tuple[ConductorConfig, Policies]] = {}

        def noted(conductor: Conductor, config: ConductorConfig, *args: Any, **more: Any) -> None:
            init(conductor, config, *args, **more)
            made[id(conductor)] = config, more.get("policies") or Policies()

        def logged(conductor: Conductor, event: Any, now: float) -> Any:
            log = logs.setdefault(id(conductor), EventLog(recorder.max_bytes))
            actions = handle(conductor, event, now)
            log.note(event, now, actions)
            if log.full:
                log.begin().checkpoint = dump(conductor, own_classes(made[id(conductor)][1]))
                recorder.num_segments += 1
            config = made[id(conductor)][0]
            recorder.finish = lambda: write_file(
                log, "1", "", config, conductor.default_slo, {}, {}, 0.0
            )
            return actions

        monkeypatch.setattr(simulation.Conductor, "__init__", noted)
        monkeypatch.setattr(simulation.Conductor, "handle", logged)

    finish: Any = None


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewind") / "trace.jsonl"
    succeed("trace", "generate", "--profile", "toolagent", "--requests", "250", "-o", path)
    return path


def test_a_decision_names_its_attempt() -> None:
    """Without the name of the attempt, a replay that swaps two attempts would look like the log."""
    desk = Desk("p0", "d0")
    assert decisions(desk.ask()) == ("d0 ReserveDecode r/1", "p0 StartPrefill r/1")
    assert decisions(desk.prefilled()) == ("d0 StartDecode r/1",)
    assert decisions(desk.handle(InstanceLost(InstanceId("d0"), "it died"))) == ("p0 Abort r/1",)


@pytest.mark.long
@pytest.mark.parametrize("max_bytes", [pytest.param(1 << 30, marks=pytest.mark.long), 600_000])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in RUNS]
)
def test_the_replay_decides_the_same(
    name: str, max_bytes: int, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "least_loaded.py").write_text(EXAMPLES["least_loaded"])
    recorder = Recorder(max_bytes)
    with monkeypatch.context() as patched:
        recorder.install(patched)
        succeed("simulate", "--trace", trace, *RUNS[name].split())
        file = read_file(recorder.finish())
    assert (recorder.num_segments > 0) == (max_bytes < 1 << 30)
    replay = Replay(file)
    for _ in replay.run():
        pass
    assert replay.differences == []
    assert replay.num_decisions > 100
    replay.conductor.validate()
    assert sum(len(segment.entries) for segment in file.segments) < max_bytes + 400_000


@pytest.mark.long
def test_what_is_left_out_shows(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the check can fail: without the reports of cached blocks, the replay decides
    otherwise."""
    recorder = Recorder(1 << 30)
    with monkeypatch.context() as patched:
        recorder.install(patched)
        flags = RUNS["goodput"].split()
        succeed("simulate", "--trace", trace, *flags)
        file = read_file(recorder.finish())
    log = EventLog(1 << 30)
    for logged in read_events(file.segments[0]):
        event = logged.event
        if isinstance(event, Reported) and isinstance(event.report, BlocksChanged):
            continue
        log.note_decided(event, logged.now, logged.decisions)
    kept = msgspec.structs.replace(file, segments=log.replayable())
    replay = Replay(kept)
    for _ in replay.run():
        pass
    assert replay.num_differences > 3


@pytest.mark.long
def test_arrivals_become_a_trace(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(1 << 30)
    with monkeypatch.context() as patched:
        recorder.install(patched)
        succeed("simulate", "--trace", trace)
        (tmp_path / "log").write_bytes(recorder.finish())
    out = tmp_path / "out.jsonl"
    command = ["rewind", str(tmp_path / "log"), "--trace", str(out)]
    done = succeed(*command, "--json", tmp_path / "f.json")
    assert "decides the same" in done.output
    assert json.loads((tmp_path / "f.json").read_text())["requests"] == 250
    given, found = list(open_trace(trace)), list(open_trace(out))
    assert [row.input_tokens for row in found] == [row.input_tokens for row in given]
    assert [row.output_tokens for row in found] == [row.output_tokens for row in given]
    shared = [len({block for row in rows for block in row.hash_ids}) for rows in (given, found)]
    full = [sum(row.input_tokens // 512 for row in given), sum(len(r.hash_ids) for r in found)]
    # the reuse is the same
    assert abs((1 - shared[1] / full[1]) - (1 - shared[0] / full[0])) < 0.05


def test_the_exported_trace_has_classes_and_separate_blocks_for_each_adapter() -> None:
    config, log = ConductorConfig(), EventLog()
    slo = Conductor(config).default_slo
    log.note(InstanceJoined(info("m0")), 0.0, ())
    for number, adapter in enumerate(("", "french", "french")):
        request = Request(
            request_id=RequestId(f"r{number}"),
            sampling=SamplingParams(max_tokens=1),
            slo=msgspec.structs.replace(slo, class_name="chat"),
            arrived_s=0.0,
            token_ids=tuple(range(64)),
            deadline_s=60.0,
            adapter=adapter,
        )
        log.note(RequestArrived(request), 0.0, ())
    replay = Replay(read_file(write_file(log, "1", "", config, slo, {}, {}, 0.0)))
    for _ in replay.run():
        pass
    lines = [json.loads(line) for line in trace_lines(replay.arrivals, {})]
    assert {line["slo_class"] for line in lines} == {"chat"}
    base, french, again = (line["hash_ids"] for line in lines)
    assert len(base) == 4 and set(base).isdisjoint(french)
    assert french == again


def test_a_replay_sends_instances_the_cache_share_of_each_tenant() -> None:
    config, log = ConductorConfig(), EventLog()
    slo = Conductor(config).default_slo
    log.note(Tick(), 0.0, ())
    data = write_file(log, "1", "", config, slo, {"a": 2.0}, {"a": 0.25}, 0.0)
    conductor = Replay(read_file(data)).conductor
    conductor.handle(InstanceJoined(info("m0")), 0.0)
    request = Request(
        request_id=RequestId("r"),
        sampling=SamplingParams(max_tokens=1),
        slo=slo,
        arrived_s=0.0,
        token_ids=(1, 2),
        deadline_s=60.0,
        tenant="a",
    )
    conductor.handle(RequestArrived(request), 0.0)
    tracked = conductor.requests[request.request_id]
    assert (tracked.share, tracked.cache_share) == (2.0, 0.25)


def test_an_own_policy_is_imported_only_when_trusted(tmp_path: Path) -> None:
    config = ConductorConfig(placement="os:system")
    log = EventLog()
    log.note(Tick(), 1.0, ())
    data = write_file(log, "1", "", config, Conductor(ConductorConfig()).default_slo, {}, {}, 0.0)
    (tmp_path / "log").write_bytes(data)
    done = invoke("rewind", tmp_path / "log")
    assert done.exit_code == 1
    assert "os:system" in done.output and "--trust-policies" in done.output


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    log = EventLog()
    log.note(InstanceLost("a", "gone"), 1.0, ())  # type: ignore[arg-type]
    slo = Conductor(ConductorConfig()).default_slo
    good = write_file(log, "1", "", ConductorConfig(), slo, {}, {}, 0.0)
    for place in range(len(MAGIC), len(good)):
        path = tmp_path / "log"
        path.write_bytes(good[:place])
        done = invoke("rewind", path)
        assert done.exit_code == 1 and done.output.count("\n") == 1, done.output
    segment = read_file(good).segments[0]
    segment.entries[5:7] = b"\xff\xff"
    with pytest.raises(EventLogError, match="damaged event"):
        list(read_events(segment))
    assert isinstance(read_file(good), EventLogFile)

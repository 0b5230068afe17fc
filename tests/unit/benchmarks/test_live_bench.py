"""Tests the common parts of live benchmarks, without a cluster: workloads, bursts, simulated twins,
oscillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import msgspec
import pytest

from benchmarks.suite.live import colocated
from benchmarks.suite.live.colocated import bench_colocated, winner
from benchmarks.suite.live.overload import oscillation
from benchmarks.suite.live.peers_live import Start, peer_names, present, ratios
from benchmarks.suite.live.vllm_client import client_figures
from benchmarks.suite.live.vllm_shapes import VllmTarget, start_peer
from moonpool.cost.fitted import FittedCost
from moonpool.types import Slo
from moonpool_lab.demo.local_server import ServerError
from moonpool_lab.profiling.live_cluster import (
    LiveCluster,
    LiveWorkload,
    estimate_capacity,
    simulate_rows,
)
from moonpool_lab.profiling.live_profile import LiveProfile

pytestmark = pytest.mark.long

COST = FittedCost(
    prefill=(0.005, 2e-4, 0.0, 1e-8),
    decode=(0.004, 2e-4, 1e-7),
    contention=(1.0, 1.0),
    control_latency_s=0.001,
    front_s=0.002,
    token_bytes=4096,
)
KINDS = ("mean", "p50", "p90", "p99")
WORKLOAD = LiveWorkload(scale=Fraction(1, 32), longest_tokens=2048)
SLO = Slo(ttft_s=1.0, tbt_s=0.05)


def profile(**changes: object) -> LiveProfile:
    cost = FittedCost(**{**{f: getattr(COST, f) for f in COST.__struct_fields__}, **changes})
    return LiveProfile(
        cost=cost,
        believed=COST,
        prefills=(),
        decodes=(),
        busy_ratios={},
        fit_error={},
        num_blocks=4096,
        block_tokens=16,
        seconds=0.0,
    )


def test_the_same_workload_at_another_rate() -> None:
    slow, fast = WORKLOAD.rows(1.0, 60.0), WORKLOAD.rows(4.0, 60.0)
    assert 30 < len(slow) < 90 and 160 < len(fast) < 320
    assert slow == WORKLOAD.rows(1.0, 60.0)
    assert max(r.input_tokens + r.output_tokens for r in fast) <= 2048
    assert WORKLOAD.block_tokens == 16


def test_bursts_keep_order_and_mean_rate() -> None:
    even = WORKLOAD.rows(4.0, 100.0)
    bursts = WORKLOAD.with_(burst=2.5).rows(4.0, 100.0)
    times = [row.arrived_s for row in bursts]
    assert times == sorted(times)
    assert len(bursts) == len(even)
    dense = sum(t % 10 < 2 for t in times) / len(times)
    assert 0.4 < dense < 0.6
    assert 0.1 < sum(r.arrived_s % 10 < 2 for r in even) / len(even) < 0.3


def test_front_and_messages_count_and_neighbours_slow_down() -> None:
    rows = WORKLOAD.rows(2.0, 30.0)
    cluster = LiveCluster()
    plain, _ = simulate_rows(cluster, profile(), rows, 16)
    front, _ = simulate_rows(cluster, profile(front_s=0.052), rows, 16)
    # All requests come later by the same time, so no other figure may change.
    assert front["ttft_s"]["mean"] - plain["ttft_s"]["mean"] == pytest.approx(0.05, abs=2e-4)
    slow, _ = simulate_rows(cluster, profile(contention=(1.5, 2.0)), rows, 16)
    assert plain["tbt_s"]["p50"] < slow["tbt_s"]["p90"] <= 2.1 * plain["tbt_s"]["p90"]
    assert slow["prefill_compute_s"]["mean"] > plain["prefill_compute_s"]["mean"]
    assert slow["prefill_compute_s"]["mean"] < 1.5 * plain["prefill_compute_s"]["mean"]


def test_capacity_follows_the_machine() -> None:
    cluster = LiveCluster()
    slow, slower = (profile(prefill=tuple(k * x for x in COST.prefill)) for k in (4, 8))
    usual = estimate_capacity(cluster, slow, WORKLOAD, 60.0, SLO)
    half = estimate_capacity(cluster, slower, WORKLOAD, 60.0, SLO)
    assert usual > 0.3
    assert 0.1 * usual < half < 0.8 * usual


def test_oscillation_of_known_series() -> None:
    swinging = oscillation([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0])
    assert swinging.decode_deviation == 0.5 and swinging.prefill_correlation == pytest.approx(-1)
    still = oscillation([1.0, 0.0, 1.0], [0.5, 0.5, 0.5])
    assert still.decode_deviation == 0 and still.prefill_correlation is None


def test_a_python_without_vllm_is_told() -> None:
    peer = VllmTarget(python="/nowhere/python")
    with (
        pytest.raises(ServerError, match="must be that of a vLLM"),
        start_peer(peer, LiveCluster(), 2048),
    ):
        pass


def test_two_of_vllm_need_two_cores() -> None:
    peer = VllmTarget(python="/nowhere/python", cores="0", shape="two")
    with pytest.raises(ServerError, match="two cores"), start_peer(peer, LiveCluster(), 2048):
        pass


def test_each_load_is_judged_by_the_best_peer() -> None:
    peers = [
        VllmTarget(batched_tokens=64),
        VllmTarget(batched_tokens=512),
        VllmTarget(shape="pair"),
    ]
    names = peer_names(peers)
    assert names == ["vLLM 64", "vLLM 512", "vLLM 1P+1D Mooncake"]
    rates = {"ours": (3.0, 6.0), names[0]: (2.0, 1.0), names[1]: (1.0, 4.0), names[2]: (0.0, 0.0)}
    curves = {name: [{"rps": rate} for rate in found] for name, found in rates.items()}
    assert ratios(curves, names, "rps") == {"ours": [1.5, 1.5]}


def test_a_peer_that_does_not_start_is_left_out_and_we_are_not() -> None:
    ended: list[str] = []

    def starting(name: str, error: str = "") -> Start:
        @contextmanager
        def start() -> Iterator[str]:
            if error:
                raise ServerError(error)
            yield f"http://{name}"
            ended.append(name)

        return start

    absent: dict[str, str] = {}
    said: list[str] = []
    systems = {"moonpool 1P+1D": starting("ours"), "vLLM": starting("vllm", "no cores")}
    systems["2 vLLM"] = starting("two")
    for name, url in present(systems, absent, said.append):
        assert ended == ([] if name == "moonpool 1P+1D" else ["ours"]), "one at a time"
        assert url == {"moonpool 1P+1D": "http://ours", "2 vLLM": "http://two"}[name]
    assert ended == ["ours", "two"]
    assert absent == {"vLLM": "no cores"} and "no cores" in said[0]
    systems["vLLM"] = starting("vllm")
    assert "vLLM" not in dict(present(systems, absent, said.append)), "not tried again"
    with pytest.raises(ServerError, match="the port is taken"):
        list(present({"moonpool 2M": starting("", "the port is taken")}, absent, said.append))


def test_what_vllm_s_client_wrote_is_read_under_our_names() -> None:
    spread = {f"{kind}_{name}_ms": 250.0 for name in ("ttft", "tpot", "itl") for kind in KINDS}
    result = spread | {
        "completed": 9,
        "failed": 1,
        "duration": 2.0,
        "total_input_tokens": 90,
        "total_output_tokens": 30,
        "request_throughput": 4.5,
        "output_throughput": 15.0,
        "total_token_throughput": 60.0,
        "request_goodput": 4.0,
    }
    found = client_figures(result, 10)
    assert (found["requests"], found["completed"], found["failed"]) == (10, 9, 1)
    assert found["tbt_s"] == {"mean": 0.25, "p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert found["tokens_per_s"] == 60.0 and found["goodput_rps"] == 4.0


def test_prompts_and_answers_of_one_length() -> None:
    rows = WORKLOAD.with_(prompts=100, answers=30).rows(2.0, 30.0)
    usual = WORKLOAD.rows(2.0, 30.0)
    assert [r.arrived_s for r in rows][:20] == [r.arrived_s for r in usual][:20]
    assert {(r.input_tokens, r.output_tokens) for r in rows} == {(100, 30)}
    ids = [i for r in rows for i in r.hash_ids]
    assert len(ids) == len(set(ids)) == 7 * len(rows), "nothing is shared"


def test_steps_depart_from_their_mean_as_they_were_measured() -> None:
    """Half of the steps take twice as long on an idle machine, the same half in every run."""
    rows = WORKLOAD.rows(1.0, 60.0)
    spread = ((1.0, 2.0), (1.0,), (1.0,))
    plain, _ = simulate_rows(LiveCluster(), profile(), rows, 16)
    found, _ = simulate_rows(LiveCluster(), profile(decode_spread=spread), rows, 16)
    again, _ = simulate_rows(LiveCluster(), profile(decode_spread=spread), rows, 16)
    assert found == again
    assert found["tbt_s"]["p90"] > 1.7 * plain["tbt_s"]["p90"]
    assert found["tbt_s"]["mean"] < 1.7 * plain["tbt_s"]["mean"]


class NoServer:
    """The part of a server that a simulated sweep needs."""

    url = ""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> NoServer:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.long
def test_a_sweep_of_lengths_is_simulated_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "LocalServer", NoServer)
    # a slower cluster needs fewer requests in its simulation
    slower = tuple(20 * x for x in COST.prefill)
    monkeypatch.setattr(colocated, "measure_live", lambda *_: profile(prefill=slower))
    monkeypatch.setattr(colocated, "SIMULATED_S", 5.0)
    workload = WORKLOAD.with_(answers=16)
    said: list[str] = []
    found = bench_colocated(LiveCluster(), workload, (64, 1024), (1.0,), 10.0, False, said.append)
    short, long = found["lengths"]
    assert (short["prompt_tokens"], long["prompt_tokens"]) == (64, 1024)
    for row in (short, long):
        assert row["planned"] == winner(row["capacity_rps"])
        assert row["capacity_rps"].keys() == {"1P+1D", "2M"}
        (point,) = row["points"]
        assert point["requests"] > 0 and "live" not in point
        assert set(point["simulated"]["goodput_rps"]) == {"1P+1D", "2M"}
    assert long["slo"]["ttft_s"] > short["slo"]["ttft_s"]
    assert sum(line.startswith("\nprompts of") for line in said) == 2


def test_a_narrow_victory_is_none() -> None:
    assert winner({"1P+1D": 1.0, "2M": 0.96}) == "alike"
    assert winner({"1P+1D": 1.0, "2M": 0.9}) == "1P+1D"
    assert winner({"1P+1D": 0.0, "2M": 0.0}) == "alike"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_admitted_under_lasting_overload_comes_in_time(seed: int) -> None:
    """The profile is a seventh too fast, like a live profile. Without learning, all admitted
    requests would be just too late. Without learning, 39 to 70 % of these requests were in time;
    with learning, 95 % are."""
    found = LiveWorkload(scale=Fraction(1, 32), seed=seed)
    truth = profile(prefill=(0.009, 6e-4, 8e-8, 15e-8), decode=(0.009, 5e-4, 7e-7))
    believed = FittedCost(prefill=(0.0075, 5e-4, 7e-8, 13e-8), decode=(0.008, 5e-4, 7e-7))
    cluster = LiveCluster(
        model="m", kv_tokens=65536, admission="predictive", slo=Slo(ttft_s=8.0, tbt_s=0.08)
    )
    rows = found.rows(20.0, 40.0)
    truth = msgspec.structs.replace(truth, believed=believed)
    figures = simulate_rows(cluster, truth, rows, found.block_tokens)[0]
    assert figures["rejected"] > 0.3 * len(rows), "that is no overload"
    assert figures["effective"] > 0.85 * figures["completed"]

"""Tests nodes of a configuration: the default is Mooncake's node, and mistakes give one line."""

from __future__ import annotations

import pytest

from moonpool.config.tables import ConfigError, HardwareConfig
from moonpool.cost.fitted import FittedCost
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.domain_cost import DomainCost
from moonpool.sim.hardware.node_cost import kv_capacity_tokens, open_cost, open_node
from moonpool.sim.hardware.parallel_cost import PipelineCost
from moonpool.sim.hardware.roofline import RooflineCost


def test_the_default_is_mooncakes_node() -> None:
    node = open_node(HardwareConfig())
    assert isinstance(node.cost, DomainCost) and node.cost.fitted is CALIBRATED
    assert node.prefill_cost is node.cost and node.domain is CALIBRATED.domain
    assert node.kv_bytes_per_token == 327_680
    assert node.dram_tokens == 3_000_000
    assert node.network_bytes_per_s == pytest.approx(87e9)
    assert node.host_bytes_per_s == 99e9
    # The memory is .9 of 8 x 80 GiB, less 141 GB of weights.
    assert node.kv_capacity_tokens == int((0.9 * 8 * 80 * 2**30 - 2 * 70_552_387_584) / 327_680)


def test_a_roofline_node() -> None:
    hardware = HardwareConfig(
        cost="roofline",
        device="H100-SXM",
        shape="qwen2.5-72b",
        nodes_per_prefill=2,
        parallelism="cpp",
    )
    node = open_node(hardware)
    assert isinstance(node.cost, RooflineCost)
    assert isinstance(node.prefill_cost, PipelineCost) and node.prefill_cost.num_stages == 2
    assert node.network_bytes_per_s == pytest.approx(8 * 50e9 * 0.87)
    assert node.dram_tokens == int(1e12 / 327_680)


def test_a_measured_profile_stands_for_itself() -> None:
    profile = FittedCost(prefill=(0.1, 0.0, 0.0, 0.0), decode=(0.1, 0.0, 0.0))
    hardware = HardwareConfig(cost="here.json", device="A10", shape="llama3-8b", devices_per_node=1)
    assert open_node(hardware, profile).cost is profile


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (HardwareConfig(device="H100-SXM"), 'not on 8 H100-SXM .*use hardware.cost = "roofline"'),
        (
            HardwareConfig(cost="rofline"),
            "unknown hardware.cost 'rofline'; did you mean 'roofline'",
        ),
        (HardwareConfig(device="H100SXM"), "unknown device 'H100SXM'; did you mean 'H100-SXM'"),
        (HardwareConfig(shape="llama"), "unknown model shape 'llama'"),
        (
            HardwareConfig(cost="roofline", device="A10", devices_per_node=4),
            "does not fit 4 A10: its weights need 141 GB of 87 GB",
        ),
        (
            HardwareConfig(cost="roofline", devices_per_node=16),
            "no all-reduce figures for 16 A800-SXM in a node",
        ),
        (
            HardwareConfig(cost="roofline", nodes_per_prefill=64, parallelism="tp"),
            "64 attention heads: it cannot be divided among 512",
        ),
        (
            HardwareConfig(
                cost="roofline", shape="mistral-7b", nodes_per_prefill=33, parallelism="cpp"
            ),
            "32 layers: it cannot have 33 stages",
        ),
    ],
)
def test_mistakes_get_one_line(hardware: HardwareConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        open_node(hardware)
    assert "\n" not in str(error.value)


def test_capacity_is_what_the_papers_fit_into_it() -> None:
    """SARATHI's largest batches of 1024 tokens are 18 for LLaMA-13B on an A6000 and 10 for
    LLaMA-33B on an A100. In one case its engine reserved more, in the other less, than the tenth of
    the memory that vLLM reserves."""
    a6000 = kv_capacity_tokens(BUILT_IN.device("A6000"), BUILT_IN.shape("llama2-13b"), 1) // 1024
    a100 = kv_capacity_tokens(BUILT_IN.device("A100-PCIE"), BUILT_IN.shape("llama-33b"), 1) // 1024
    assert (a6000, a100) == (24, 7)
    more = kv_capacity_tokens(BUILT_IN.device("A100-PCIE"), BUILT_IN.shape("llama-33b"), 1, 0.95)
    assert more // 1024 == 10


def test_open_cost_is_the_one_door() -> None:
    device, shape = BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b")
    assert isinstance(open_cost("a800-llama3-70b", device, shape, 8), DomainCost)
    assert open_cost("roofline", device, shape, 4).step_s((), 1, 10) > 0

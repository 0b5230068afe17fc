"""Tests the resources that a cluster requests from Ray."""

from __future__ import annotations

import pytest

from moonpool.conductor.actions import InstancesWanted
from moonpool.config.parse import parse_config, write_toml
from moonpool.config.tables import Config, ConfigError
from moonpool.ray.demands import added_group, first_groups, lacking, settled, total_of
from moonpool.ray.scaling import changes
from moonpool.types import Role

ON_RAY = "[cluster]\nlauncher = 'ray'\n"


def test_each_role_is_a_group_that_ray_spreads() -> None:
    text = "[cluster]\nlauncher = 'ray'\nprefill = 2\ndecode = 1\nattention = 2"
    groups = first_groups(parse_config(text), num_heads=2)
    names = {group.name: [member.name for member in group.members] for group in groups}
    assert names == {
        "head": ["head-0", "head-1"],
        "prefill": ["prefill-0", "prefill-1"],
        "decode": ["decode-0"],
        "attention": ["attention-0", "attention-1"],
    }


def test_a_bundle_has_what_all_processes_of_an_instance_need() -> None:
    text = (
        f"{ON_RAY}[engine]\npipeline_parallel_size = 2\n"
        "[ray]\ncpus = 3\ngpus = 1\nmemory_bytes = 1000\nssd_resource = 'ssd'"
    )
    config = parse_config(text)
    group = added_group(config, Role.PREFILL, 5)
    assert group.name == "prefill-5"
    wanted = {"CPU": 6.0, "GPU": 2.0, "memory": 1000.0, "ssd": 1.0}
    assert group.members[0].bundle == wanted
    assert added_group(config, Role.DECODE, 0).members[0].bundle == wanted | {"CPU": 3, "GPU": 1}


def test_what_a_local_ray_lacks_is_told() -> None:
    config = parse_config(f"{ON_RAY}prefill = 2\ndecode = 1\n[ray]\ngpus = 1\nssd_resource = 'ssd'")
    total = total_of(first_groups(config, num_heads=1))
    assert total == {"CPU": 4.0, "GPU": 3.0, "ssd": 3.0}
    assert lacking(total, {"CPU": 4.0, "GPU": 3.0, "ssd": 3.0, "memory": 1e9}) == ""
    said = lacking(total, {"CPU": 8.0, "GPU": 1.0})
    assert said == "3 of 'GPU' (there are 1), 3 of 'ssd' (there are 0)"


def test_processes_compute_with_what_ray_has_set_aside_and_start_no_others() -> None:
    own = settled(parse_config(f"{ON_RAY}[ray]\ncpus = 3\ngpus = 1\n[engine]\ndevice = 'auto'"))
    assert own.engine.threads == 3 and own.engine.device == "cuda"
    assert own.cluster.launcher == "local"
    assert settled(parse_config(f"{ON_RAY}[ray]\ncpus = 0.5")).engine.threads == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[model]\nname = 'a \"quoted\" name \\\\ é'\nlora_modules = ['a=b', 'c=d']",
        '[engine]\nspeculative_config = {method = "ngram"}\n[pool]\nprefix_caching = false',
        "[api]\napi_keys = ['secret']\n[slo]\nttft_s = 0.5",
    ],
)
def test_a_configuration_is_written_as_it_is_read(text: str) -> None:
    config = parse_config(text)
    assert parse_config(write_toml(config)) == config
    assert write_toml(Config()).count("=") == 0  # an empty value would be refused for a protection


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[ray]\nvllm_command = 'vllm serve x --port {port}'", 'cluster.launcher must be "ray"'),
        (f"{ON_RAY}[ray]\nvllm_command = 'x {{port}}'", "ray.vllm_command must be given with eng"),
        (f"{ON_RAY}[engine]\nkind = 'vllm'\n[ray]\nvllm_command = 'x'", "a command with {port}"),
        (f"{ON_RAY}[conductor]\nautoscale_webhook = 'http://x'", "autoscale_webhook must be left"),
        ("[ray]\nname = 'a b'", "ray.name must be letters"),
    ],
)
def test_a_contradiction_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("{", "\\{")):
        parse_config(text)


LEAST = {Role.PREFILL: 1, Role.DECODE: 2}


@pytest.mark.parametrize(
    ("wanted", "present", "expected"),
    [
        ((1, 2), {}, []),
        ((0, 0), {}, []),  # no demand, because the first instances always run
        ((2, 2), {}, [(Role.PREFILL, (1,), ())]),
        ((3, 5), {Role.PREFILL: [2]}, [(Role.PREFILL, (1,), ()), (Role.DECODE, (2, 3, 4), ())]),
        ((1, 3), {Role.DECODE: [2, 3]}, [(Role.DECODE, (), (3,))]),
        ((1, 99), {}, [(Role.DECODE, (2, 3, 4, 5), ())]),  # demands stop at 6 instances
    ],
)
def test_wanted_numbers_become_instances_to_add_and_to_give_back(
    wanted: tuple[int, int],
    present: dict[Role, list[int]],
    expected: list[tuple[Role, tuple[int, ...], tuple[int, ...]]],
) -> None:
    found = changes(InstancesWanted(*wanted), LEAST, 6, present)
    assert [(c.role, c.add, c.remove) for c in found] == expected

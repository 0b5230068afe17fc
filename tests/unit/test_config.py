"""Tests that every mistake in the configuration gives a message that says what to do."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from moonpool.config.parse import parse_config
from moonpool.config.schema import FieldSchema, schema_of
from moonpool.config.tables import Admission, Config, ConfigError, choices


def test_nothing_is_the_default() -> None:
    assert parse_config("") == Config()
    assert parse_config("", {}) == Config()


def test_tables_and_overrides() -> None:
    text = "[cluster]\nprefill = 2\ndecode = 3\n[slo]\nttft_s = 5\n"
    config = parse_config(text, {"cluster": {"decode": 1}, "api": {"port": 9000}})
    assert (config.cluster.prefill, config.cluster.decode) == (2, 1)
    assert config.slo.ttft_s == 5.0 and config.api.port == 9000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster]\nprefil = 2", "unknown key cluster.prefil; did you mean 'prefill'?"),
        ("[clusters]\nprefill = 2", r"unknown table \[clusters\]; did you mean 'cluster'?"),
        ("[zzzzzzz]", r"unknown table \[zzzzzzz\]; known are model, cluster"),
        ("[api]\nqqqqqqqqq = 1", "unknown key api.qqqqqqqqq; known are host, port"),
        ("cluster = 3", r"\[cluster\] must be a table, not int"),
        ("[cluster]\nprefill = '2'", "bad value: Expected `int`, got `str`.*cluster.prefill"),
        ("[cluster]\nprefill = true", "Expected `int`, got `bool`"),
        ("[model]\ndtype = 'float16'", "Invalid enum value 'float16'"),
        ("[conductor]\nadmission = 'never'", "admission must be one of 'none'.* not 'never'"),
        ("[cluster\n", "not valid TOML"),
        ("[cluster]\nprefill = -1", "cluster.prefill must be >= 0"),
        ("[cluster]\nprefill = 0", "at least one prefill and one decode instance"),
        ("[cluster]\nprefill = 60000\ndecode = 60000", "<= 65536"),
        ("[pool]\nblock_tokens = 24", "pool.block_tokens must be a multiple of 16"),
        ("[pool]\nblock_tokens = 0", "pool.block_tokens"),
        ("[slo]\nttft_s = 0", "slo.ttft_s must be > 0 seconds"),
        ("[slo]\ntbt_s = nan", "slo.tbt_s must be > 0 seconds"),
        ("[api]\nport = 70000", "api.port must be 0 to 65535"),
        ("[api]\nrequest_timeout_s = inf", "api.request_timeout_s"),
        ("[engine]\nchunk_tokens = 0", "engine.chunk_tokens must be >= 1"),
        ("[conductor]\nmax_attempts = 0", "conductor.max_attempts must be 1 to 10"),
        ("[conductor]\nrole_balance_window_s = 0", "role_balance_window_s must be 1 to 86400"),
        (
            '[conductor]\nrole_balance = "switch"\n[hardware]\nnodes_per_prefill = 2',
            "a group of nodes cannot become a decode instance",
        ),
        ("[engine]\npipeline_parallel_size = 0", "engine.pipeline_parallel_size must be 1 to 64"),
        (
            "[engine]\npipeline_parallel_size = 2\n[hardware]\nnodes_per_prefill = 2",
            "each stage is a node",
        ),
        ("[engine]\ntensor_parallel_size = 3", "engine.tensor_parallel_size must be 1, 2, 4, 8"),
        (
            '[engine]\ndevice = "cuda"\ndecode_tensor_parallel_size = 2',
            "engine.decode_tensor_parallel_size must be 1 while engine.device",
        ),
        (
            "[engine]\ntensor_parallel_size = 2\ndecode_pipeline_parallel_size = 2",
            "engine.tensor_parallel_size must be 1 where instances have stages",
        ),
        (
            "[attention]\nown_tokens = 100",
            "cluster.attention must be > 0 to set attention.own_tokens",
        ),
        (
            "[cluster]\nattention = 1\n[attention]\nown_tokens = -1",
            "attention.own_tokens must be >= 0",
        ),
        (
            '[cluster]\nattention = 2\n[attention]\nown_tokens = 9\npartition = "head"',
            "attention.own_tokens must be 0 with attention.partition",
        ),
        (
            "[cluster]\nattention = 1\n[engine]\ntensor_parallel_size = 2",
            "engine.tensor_parallel_size must be 1 with attention workers",
        ),
        (
            "[engine]\ntensor_parallel_size = 2\n[hardware]\nnodes_per_prefill = 2",
            "each rank is a node",
        ),
        ('[api]\napi_keys = [""]', r"api.api_keys \(--api-key\) is given and empty"),
        ('[api]\nallowed_origins = ["https://x.example/"]', "api.allowed_origins must be origins"),
        ('[api]\nallowed_origins = ["x.example"]', "api.allowed_origins must be origins"),
        ('[api]\nallowed_hosts = ["http://x.example"]', "api.allowed_hosts must be names"),
        ('[api]\napi_keys = ["good", "a b"]', "api.api_keys must be non-empty ASCII"),
        ('[api]\napi_keys = ["ké"]', "api.api_keys must be non-empty ASCII"),
        ("[conductor]\nkvcache_balancing_threshold = 0.5", "kvcache_balancing_threshold must be"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(text)


def test_mistakes_in_overrides() -> None:
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        parse_config("", {"api": {"ports": 1}})
    with pytest.raises(ConfigError, match="unknown table"):
        parse_config("", {"apy": {"port": 1}})
    with pytest.raises(ConfigError, match="must be a table"):
        parse_config("api = 3", {"api": {"port": 1}})


def test_certificates_go_with_attention_workers_and_not_with_nixl() -> None:
    tls = '[tls]\ncertfile = "a.pem"\nca_certs = "ca.pem"\n'
    assert parse_config(f"{tls}[cluster]\nattention = 2").tls.certfile == "a.pem"
    with pytest.raises(ConfigError, match=r"network\.nixl must be false .* without encryption"):
        parse_config(f"{tls}[network]\nnixl = true")


def test_one_mixed_instance_is_a_cluster() -> None:
    config = parse_config("[cluster]\nprefill = 0\ndecode = 0\nmixed = 1")
    assert config.cluster.mixed == 1


def test_choices_for_the_command_line() -> None:
    assert choices(Admission) == ("none", "baseline", "early", "predictive", "goodput")


MANY = """
[pool]
block_tokens = "many"
blok = 3
[conductor]
load_limit = -1.0
[aip]
port = 1
[api]
port = 99999999
api_keys = [7]
[engine]
speculative_config = {method = "ngram", num_speculative_tokens = 99}
"""


def test_all_mistakes_are_told() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(MANY, {"slo": {"ttft_s": -1.0}})
    told = raised.value.problems
    assert len(told) == 8
    for words in (
        "unknown key pool.blok; did you mean",
        "unknown table [aip]; did you mean 'api'?",
        "the config has a bad value: Expected `int`, got `str` - at `$.pool.block_tokens`",
        "conductor.load_limit must be > 0",
        "api.port must be 0 to 65535",
        "Expected `str`, got `int` - at `$.api.api_keys[0]`",
        "Expected `int` <= 16 - at `$.engine.speculative_config.num_speculative_tokens`",
        "slo.ttft_s must be > 0 seconds",
    ):
        assert sum(words in one for one in told) == 1, words
    assert str(raised.value) == "; ".join(told)


def test_all_contradictions_are_told() -> None:
    text = (
        "[cluster]\nprefill = 0\ndecode = 0\n[pool]\nblock_tokens = 48\n"
        '[attention]\npartition = "tokens"\n[api]\nssl_keyfile = "k"\n[tls]\ncertfile = "c"'
    )
    with pytest.raises(ConfigError) as raised:
        parse_config(text)
    assert [one.split(" must be ")[0] for one in raised.value.problems] == [
        "cluster",
        "pool.block_tokens",
        "api.ssl_certfile",
        "tls.ca_certs",
    ]


def values_of(field: FieldSchema) -> SearchStrategy[Any]:
    """Draws right and wrong values of a key, of any type."""
    wrong = st.sampled_from([-1, 0, 1, 2, 3, 10**30, 1.5, float("nan"), "", "x", True, [], [1], {}])
    right = get_args(field.kind) if get_origin(field.kind) is Literal else ()
    return st.one_of(st.sampled_from(right), wrong) if right else wrong


@given(names=st.lists(st.sampled_from(sorted(schema_of(Config))), max_size=8), data=st.data())
def test_any_values_are_a_configuration_or_lines_that_say_why_not(
    names: list[str], data: st.DataObject
) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for name in names:
        field = schema_of(Config)[name]
        tables.setdefault(field.table, {})[field.key] = data.draw(values_of(field), label=name)
    told: tuple[str, ...] = ("",)
    try:
        parse_config("", tables)
    except ConfigError as error:
        told = error.problems
    assert told and all("\n" not in one for one in told) and len(set(told)) == len(told)

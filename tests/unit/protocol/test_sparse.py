"""Tests messages for a peer of the earlier version: the same values, without fields that the peer
may lack."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.tables import AttentionConfig, Config, PoolConfig
from moonpool.cost.domain import CostDomain
from moonpool.protocol.frames import DownFrame, Joined, Setup, Stop
from moonpool.protocol.messages import Abort, AttemptId, AttemptSpec, AttemptTokens, StartPrefill
from moonpool.protocol.sparse import without_defaults
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, SamplingParams, Slo, Token, TokenLogprobs

CONFIG = Config()
ADDRESS = PeerAddress(
    instance_id=InstanceId("a"), host_id="h", unix_name="", tcp_host="", tcp_port=1
)
SETUP = Setup(
    model=CONFIG.model,
    pool=PoolConfig(block_tokens=32),
    mooncake=CONFIG.mooncake,
    network=CONFIG.network,
    engine=CONFIG.engine,
    slo=CONFIG.slo,
    learning=True,
    num_instances=1,
    num_processes=1,
    attention=(ADDRESS,),
    sharing=AttentionConfig(),
)


@pytest.mark.parametrize("frame", [SETUP, Stop(), Abort(attempt_id="x")])
def test_the_form_decodes_to_the_same_message(frame: DownFrame) -> None:
    body = msgspec.msgpack.encode(without_defaults(frame))
    assert msgspec.msgpack.decode(body, type=DownFrame) == frame
    assert len(body) <= len(msgspec.msgpack.encode(frame))


def test_fields_with_their_default_are_left_out() -> None:
    found = without_defaults(SETUP)
    assert found["pool"] == {"block_tokens": 32}
    assert "sharing" not in found
    assert "release" not in without_defaults(Joined(info=3))  # type: ignore[arg-type]


def test_a_share_of_the_cache_does_not_reach_a_peer_that_lacks_it() -> None:
    work = AttemptSpec(
        attempt_id=AttemptId("r/1"),
        token_ids=(1, 2),
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=1),
        slo=Slo(ttft_s=1.0, tbt_s=1.0),
        tenant="bulk",
        use_cache=True,
        timeout_s=9.0,
        share=2.0,
        cache_share=0.25,
    )
    found = without_defaults(StartPrefill(attempt=work))
    assert "cache_share" not in found["work"] and found["work"]["share"] == 2.0


def test_a_rank_does_not_reach_a_peer_that_lacks_it() -> None:
    scored = TokenLogprobs(-1.0, ((3, -0.5),), rank=2)
    report = AttemptTokens(AttemptId("r"), (Token(3, scored, (scored,)),))
    body = msgspec.msgpack.encode(without_defaults(report))
    former = [-1.0, [[3, -0.5]]]
    assert msgspec.msgpack.decode(body) == ["r", [[3, former, [former], b""]], None]
    (token,) = msgspec.msgpack.decode(body, type=AttemptTokens).tokens
    assert token.logprobs == TokenLogprobs(-1.0, ((3, -0.5),))


def test_a_required_field_reaches_a_peer_whatever_its_name() -> None:
    domain = CostDomain((1, 2), 0.5, (1, 2), (3, 4))
    assert without_defaults(domain)["context_tokens"] == [3, 4]

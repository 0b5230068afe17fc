"""Prompts find the blocks of their own salt, as a server names it in its events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.call_headers import tenant_of
from moonpool.epp.client_salts import salted_tenant, with_roots
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.types import payer_of, paying, salt_part
from moonpool.vllm.actions import CacheEventsReceived
from moonpool.vllm.block_names import ExternalBlocks, ExternalBlocksStored

LAYOUT = b"layout"
TOKENS = (1, 2, 3, 4)
UNSALTED_ROOT = root_key(LAYOUT, "").hex()


def named(salt: str | None, adapter: str = "") -> set[bytes]:
    """Returns the names of two blocks after the events of a server that stored them."""
    first = ExternalBlocksStored((1,), None, TOKENS[:2], salt=salt, adapter=adapter)
    blocks = ExternalBlocks(LAYOUT, 2)
    for event in (first, ExternalBlocksStored((2,), 1, TOKENS[2:], adapter=adapter)):
        for translated in with_roots(CacheEventsReceived((event,)), LAYOUT).events:
            blocks.hear(translated)
    return set(blocks.keys)


def wanted(payer: str, salt: str | None, adapter: str = "") -> set[bytes]:
    return set(block_keys(TOKENS, 2, root_key(LAYOUT, salted_tenant(payer, salt), adapter)))


@pytest.mark.parametrize("salt", [None, "s", "/s", "ä" * 500, "\ud800", UNSALTED_ROOT])
@pytest.mark.parametrize("adapter", ["", "poet"])
def test_a_prompt_finds_the_blocks_of_its_salt_whoever_pays(salt: str | None, adapter: str) -> None:
    assert named(salt, adapter) == wanted("", salt, adapter) == wanted("team-a", salt, adapter)
    assert payer_of(salted_tenant("team-a", salt)) == "team-a"
    for other in ("t", UNSALTED_ROOT + "0", None):
        if other != salt:
            assert not named(salt, adapter) & wanted("", other, adapter)
    assert not named(salt, adapter) & wanted("", salt, "another")


SALTS = st.none() | st.text("./ab", min_size=1, max_size=4)
NAMES = st.sampled_from(["", "a", "b"])


@given(NAMES, SALTS, NAMES, SALTS)
def test_no_client_of_a_cluster_shares_blocks_by_its_choice_of_a_salt(
    tenant: str, salt: str | None, other_tenant: str, other_salt: str | None
) -> None:
    own, other = tenant_of(tenant, salt), tenant_of(other_tenant, other_salt)
    shares = salt_part(own) == salt_part(other)
    assert shares == ((tenant, salt) == (other_tenant, other_salt))
    assert payer_of(own) == tenant
    if tenant and other_salt is not None:
        assert salt_part(own) != salt_part(paying("", other_salt))

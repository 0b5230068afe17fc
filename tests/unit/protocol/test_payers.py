"""Tests which tenant pays, and whose blocks are shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.call_headers import tenant_of
from moonpool.protocol.block_layout import root_key
from moonpool.types import payer_of, paying, salt_part
from moonpool.vllm.block_names import salt_of

NAMES = st.text(st.characters(exclude_characters="/", codec="utf-8"), max_size=8)


@given(NAMES, NAMES)
def test_who_only_pays_apart_shares_the_blocks_of_everybody(one: str, other: str) -> None:
    assert payer_of(paying(one)) == one
    assert root_key(b"layout", paying(one)) == root_key(b"layout", paying(other))
    assert root_key(b"layout", paying(one)) == root_key(b"layout", "")
    assert salt_of(b"layout", paying(one)) is None


@given(NAMES, st.text(min_size=1, max_size=8))
def test_no_tenant_and_no_salt_of_a_client_reads_them(name: str, salt: str) -> None:
    tenant = tenant_of(name, salt)
    assert payer_of(tenant) == name and salt_part(tenant) == tenant
    assert root_key(b"layout", tenant) != root_key(b"layout", "")
    if name:
        assert root_key(b"layout", tenant_of(name, None)) != root_key(b"layout", "")

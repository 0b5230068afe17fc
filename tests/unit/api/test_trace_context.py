"""Tests the `traceparent` header: which values are taken, which count as absent, and what is passed
on."""

from __future__ import annotations

import pytest

from moonpool.api.call_headers import beside, read_traceparent

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01".encode()


def test_a_server_that_exports_stands_under_the_client() -> None:
    found = read_traceparent(HEADER, exports=True)
    assert found is not None and found.exported
    assert (found.trace_id, found.parent_id) == (TRACE, PARENT)
    assert found.span_id not in (PARENT, "")
    assert found.traceparent == f"00-{TRACE}-{found.span_id}-01"
    assert beside(found).span_id != found.span_id


def test_a_server_that_exports_nothing_passes_the_header_on() -> None:
    found = read_traceparent(HEADER, exports=False)
    assert found is not None and not found.exported
    assert found.traceparent.encode() == HEADER
    assert beside(found) is found


def test_unsampled_requests_are_passed_on_and_not_exported() -> None:
    found = read_traceparent(HEADER[:-1] + b"0", exports=True)
    assert found is not None and not found.exported and found.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"00",
        HEADER.upper(),
        HEADER + b"-more",
        b"ff" + HEADER[2:],
        HEADER.replace(TRACE.encode(), b"0" * 32),
        HEADER.replace(PARENT.encode(), b"0" * 16),
    ],
)
def test_malformed_headers_count_as_none(header: bytes) -> None:
    assert read_traceparent(header, exports=False) is None
    begun = read_traceparent(header, exports=True)
    assert begun is not None and begun.exported and begun.parent_id == ""


def test_later_versions_may_have_more() -> None:
    found = read_traceparent(b"01" + HEADER[2:] + b"-more", exports=True)
    assert found is not None and found.exported
    assert (found.trace_id, found.parent_id) == (TRACE, PARENT)
    assert found.traceparent == f"00-{TRACE}-{found.span_id}-01"

"""The messages of Envoy's external processing, made and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from moonpool.api.errors import ApiError
from moonpool.epp.call_headers import (
    DESTINATION,
    DROPPED,
    OWN,
    PREFILL,
    RANK,
    SERVED,
    SUBSET,
    dropped_reason,
)
from moonpool.epp.routed_call import Route

SUBSET_SPACE = "envoy.lb.subset_hint"
LB_SPACE = "envoy.lb"
CHUNK_BYTES = 62_000
"""Envoy takes bodies in pieces of at most 64 KiB."""
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = ProcessingMode.BUFFERED
OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

GO_ON_REQUEST = ProcessingResponse(request_headers=HeadersResponse())
GO_ON_RESPONSE = ProcessingResponse(response_headers=HeadersResponse())
GO_ON_REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse())
GO_ON_RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse())
GO_ON_RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse())


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Returns the headers by their names, which Envoy sends in lower case. Of headers with equal
    names the last one counts."""
    return {
        each.key: each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in headers.headers
    }


def read_subset(message: ProcessingRequest) -> tuple[str, ...] | None:
    """Returns the addresses among which the gateway lets the picker choose, or None if it names
    none."""
    spaces = message.metadata_context.filter_metadata
    if SUBSET_SPACE not in spaces:
        return None
    fields = spaces[SUBSET_SPACE].fields
    if SUBSET not in fields:
        return None
    given = fields[SUBSET]
    if given.WhichOneof("kind") == "string_value":
        return _addresses(given.string_value)
    return tuple(each.string_value for each in given.list_value.values if each.string_value)


def read_served(message: ProcessingRequest) -> str:
    """Returns the responding address, if there are several, or "" if the gateway does not say."""
    spaces = message.metadata_context.filter_metadata
    return spaces[LB_SPACE].fields[SERVED].string_value if LB_SPACE in spaces else ""


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def routed_headers(route: Route | None, num_bytes: int | None) -> HeaderMutation:
    """Returns the headers that send a call to the endpoint of `route`, or let the gateway choose if
    that is None. `num_bytes`: the length of the body, if this picker forwards it."""
    values: dict[str, str] = {}
    if route is not None:
        values[DESTINATION] = route.destinations
        if route.prefill is not None:
            values[PREFILL] = route.prefill.address
        if route.endpoint.rank is not None:
            values[RANK] = str(route.endpoint.rank)
    if num_bytes is not None:
        values["content-length"] = str(num_bytes)
    return HeaderMutation(
        set_headers=_options(values), remove_headers=[name for name in OWN if name not in values]
    )


def _options(values: Mapping[str, str]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE
        )
        for name, value in values.items()
    ]


def request_sent_on(route: Route | None, num_bytes: int | None) -> ProcessingResponse:
    """The response to the request's headers."""
    common = CommonResponse(
        header_mutation=routed_headers(route, num_bytes), clear_route_cache=True
    )
    answer = ProcessingResponse(request_headers=HeadersResponse(response=common))
    _name_destination(answer, route)
    return answer


def buffered_sent_on(route: Route | None) -> ProcessingResponse:
    """The response to a request whose headers and body Envoy has held back."""
    common = CommonResponse(header_mutation=routed_headers(route, None), clear_route_cache=True)
    answer = ProcessingResponse(request_body=BodyResponse(response=common))
    _name_destination(answer, route)
    return answer


def _name_destination(answer: ProcessingResponse, route: Route | None) -> None:
    if route is not None:
        space: Struct = answer.dynamic_metadata.fields[LB_SPACE].struct_value
        space.fields[DESTINATION].string_value = route.destinations


def body_sent_on(parts: Sequence[bytes], ends: bool) -> Iterator[ProcessingResponse]:
    """Forwards the whole body of the request. `ends`: whether no trailers follow."""
    whole = b"".join(parts)
    starts = range(0, len(whole), CHUNK_BYTES) if whole else (0,)
    for start in starts:
        is_last = start + CHUNK_BYTES >= len(whole)
        piece = StreamedBodyResponse(
            body=whole[start : start + CHUNK_BYTES], end_of_stream=ends and is_last
        )
        mutation = BodyMutation(streamed_response=piece)
        common = CommonResponse(body_mutation=mutation)
        yield ProcessingResponse(request_body=BodyResponse(response=common))


def response_part(body: bytes, ends: bool) -> ProcessingResponse:
    """A part of the response, as it came."""
    piece = StreamedBodyResponse(body=body, end_of_stream=ends)
    common = CommonResponse(body_mutation=BodyMutation(streamed_response=piece))
    return ProcessingResponse(response_body=BodyResponse(response=common))


def refusal(error: ApiError) -> ProcessingResponse:
    """Ends the call with an error in OpenAI's form."""
    values = {name.decode("latin-1"): value.decode("latin-1") for name, value in error.headers}
    values["content-type"] = "application/json"
    reason = dropped_reason(error)
    if reason:
        values[DROPPED] = reason
    immediate = ImmediateResponse(
        status=HttpStatus(code=error.status),
        headers=HeaderMutation(set_headers=_options(values)),
        body=error.payload(),
        details=f"moonpool_{error.code or 'refused'}",
    )
    return ProcessingResponse(immediate_response=immediate)

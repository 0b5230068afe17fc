"""The picker: a head whose instances are in its own process, and whose answers go through Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from moonpool.api.body_process import Kind
from moonpool.api.frontend import ApiOptions, RequestRefused
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.api.models.model_apis import ModelApi, ModelApis
from moonpool.api.preparation import PreparedCall, check_model
from moonpool.api.trace_context import read_traceparent
from moonpool.conductor.state import TrackedRequest
from moonpool.config.tables import Config
from moonpool.epp.call_headers import CallTerms, read_terms, request_id_of
from moonpool.epp.endpoint import Endpoint, Listing
from moonpool.epp.endpoint_worker import PickerShared
from moonpool.epp.members import Members
from moonpool.epp.routed_call import Route, RoutedCall
from moonpool.head.head import Head
from moonpool.head.models.served_model import ServedModel
from moonpool.head.response_stream import ResponseStream
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import COMPLETIONS, MEDIA_PATHS, POOLING_PATHS
from moonpool.types import MALFORMED, InstanceId, Request, RequestId, SamplingParams

GENERATING = (COMPLETIONS, *MEDIA_PATHS)
NO_ENDPOINT_RETRY_S = 5.0
SETTLE_S = 5.0
"""Within which the Conductor hears the end of a response."""


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class NoEndpointError(RequestRefused):
    """The endpoints that a gateway allows are none of ours, or there are none."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "no_instance", message, NO_ENDPOINT_RETRY_S)


class Picked:
    """A call that was placed. `close` it when the gateway is done with it."""

    def __init__(self, picker: Picker, model: ServedModel, request_id: RequestId) -> None:
        self._picker, self._model = picker, model
        self.request_id = request_id
        self.call = RoutedCall(self._partner, self._abandon)
        self.answer: ResponseStream | None = None
        self._is_closed = False

    def finish(self) -> None:
        """The response was whole: closes it when the Conductor has heard its last token."""
        if self.answer is None or self._is_closed:
            return
        self._is_closed = True
        self._picker.keep(self._finish(self.answer))

    def close(self) -> None:
        """Nobody waits for the response any more. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._end()

    async def _finish(self, answer: ResponseStream) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                while (await answer.next_output()).finish_reason is None:
                    pass
        except (TimeoutError, RequestRefused):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._picker.shared.desk.remove(self.request_id)
        if self.answer is not None:
            self._picker.head.close(self._model, self.request_id)

    def _tracked(self) -> TrackedRequest:
        return self._model.conductor.requests[self.request_id]

    def _partner(self) -> Endpoint:
        attempt = self._tracked().attempt
        assert attempt is not None
        return self._picker.endpoint(attempt.decoder)

    def _abandon(self, reason: str) -> None:
        self._picker.head.abort(self.request_id, reason, self._model)


class Picker:
    """`start`, then `update` with what a source lists, and `pick`. `stop` ends it."""

    def __init__(self, config: Config, options: ApiOptions, api_key: str = "") -> None:
        self.head = Head(config, None, b"")
        self.models = ModelApis(self.head, options)
        self.shared = PickerShared(self.head, api_key, self.head.now)
        self.members = Members(self.shared, config.api.drain_seconds)
        self.max_body_bytes = config.api.max_body_bytes
        self.listing = Listing()
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def start(self) -> None:
        await self.head.start(None)

    async def stop(self) -> None:
        await self.head.stop()
        await self.members.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.models.close()

    def update(self, listing: Listing) -> None:
        self.listing = listing
        self.members.update(listing.endpoints)

    def endpoint(self, instance_id: InstanceId) -> Endpoint:
        found = self.members.find(instance_id)
        assert found is not None, instance_id
        return found

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something to its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Calls

    async def pick(
        self,
        path: str,
        headers: Mapping[str, str],
        raw: bytes,
        subset: Sequence[str] | None = None,
    ) -> tuple[Route, Picked | None]:
        """Decides where a call goes. `subset`: the addresses that the gateway allows; None: it
        allows all. A call that computes nothing is not booked (None).

        Raises ApiError and RequestRefused.
        """
        within = self._within(subset)
        if path not in GENERATING and path not in POOLING_PATHS:
            return self._next(within), None
        api = self._api(raw, path)
        model = api.frontend
        assert isinstance(model, ServedModel)
        arrived_s = self.head.now()
        terms = read_terms(
            headers, self.head.default_slo, self.head.request_timeout_s, self.listing.objectives
        )
        kind: Kind = "routed" if path in MEDIA_PATHS else "pooling"
        prepared = await api.bodies.call(kind, raw, "", terms.timeout_s)
        request_id = self._new_id(headers)
        call = _forwarded(path, prepared)
        request = self._request(request_id, model, terms, arrived_s, prepared, call)
        traceparent = headers.get("traceparent", "").encode("ascii", "replace")
        trace = read_traceparent(traceparent, self._options.exports_traces)
        request = msgspec.structs.replace(request, within=within, trace=trace)
        picked = Picked(self, model, request_id)
        self.shared.desk.add(request_id, picked.call)
        try:
            picked.answer = self.head.begin(
                model, request, call=call, on_refused=picked.call.on_refused
            )
            return await picked.call.chosen, picked
        except BaseException:
            picked.close()
            raise

    def _api(self, raw: bytes, path: str) -> ModelApi:
        """The model that a call means by its body. Raises ApiError (404), RequestRefused (503)."""
        apis = self.models.all()
        if not apis:
            raise NoEndpointError("No endpoint is ready yet. Send the request again later.")
        if len(apis) == 1:
            return apis[0]
        try:
            name = _NAMED.decode(raw).model
        except MALFORMED:
            return apis[0]
        named = [api for api in apis if api.is_named(name)]
        if not named:
            check_model(name, [each for api in apis for each in api.names])
        return next((api for api in named if api.has(path)), named[0])

    def _new_id(self, headers: Mapping[str, str]) -> RequestId:
        """Two calls may share their `x-request-id`; requests may not."""
        request_id = RequestId(request_id_of(headers))
        if request_id in self.shared.desk:
            request_id = RequestId(request_id_of({}))
        return request_id

    def _request(
        self,
        request_id: RequestId,
        model: ServedModel,
        terms: CallTerms,
        arrived_s: float,
        prepared: PreparedCall,
        call: ForwardedCall,
    ) -> Request:
        body: ForwardedBody = prepared.original
        tokens = prepared.prompts[0]
        left = max(model.card.max_model_tokens - len(tokens), 1)
        most = 1
        if call.path in GENERATING:
            most = max(min(body.most_tokens or left, left), 1)
        return Request(
            request_id=request_id,
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=most),
            slo=terms.slo,
            arrived_s=arrived_s,
            deadline_s=arrived_s + terms.timeout_s,
            tenant="",
            adapter=model.card.adapter_of(body.model),
            priority=terms.priority,
            # What is learned from an answer is of use if its prompt and its first token are known.
            forwarded=not (call.is_exact and call.tells_first_token),
        )

    # Endpoints

    def _within(self, subset: Sequence[str] | None) -> tuple[InstanceId, ...] | None:
        """The instances that may serve a call; None: all. Raises RequestRefused."""
        suspects = self.shared.suspects
        if subset is None and not suspects:
            return None
        endpoints = list(self.members)
        if subset is not None:
            allowed = set(subset)
            endpoints = [
                each for each in endpoints if each.address in allowed or each.host in allowed
            ]
            if not endpoints:
                raise NoEndpointError("None of the endpoints that the gateway allows is known.")
        names = [InstanceId(each.name) for each in endpoints]
        sound = [name for name in names if name not in suspects]
        return tuple(sound or names)

    def spare(self, subset: Sequence[str] | None) -> Route:
        """As `pick`, for a call whose body is not seen: it is not booked. Raises RequestRefused."""
        return self._next(self._within(subset))

    def _next(self, within: Sequence[InstanceId] | None) -> Route:
        """An endpoint that is up, one after the other."""
        up = [
            name
            for model in self.head.served
            for name, state in model.conductor.instances.items()
            if state.drain is None and (within is None or name in within)
        ]
        decoding = [name for name in up if self.endpoint(name).role.decodes] or up
        if not decoding:
            raise NoEndpointError("No endpoint is ready yet. Send the request again later.")
        self._turn += 1
        return Route(self.endpoint(decoding[self._turn % len(decoding)]))


def _forwarded(path: str, prepared: PreparedCall) -> ForwardedCall:
    body: ForwardedBody = prepared.original
    streams = bool(body.stream) and path in GENERATING
    return ForwardedCall(path=path, body=b"", is_exact=prepared.is_exact, tells_first_token=streams)

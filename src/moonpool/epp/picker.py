"""The picker: a head whose instances are in its own process, and whose answers go through Envoy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from moonpool.api.body_process import Kind
from moonpool.api.call_headers import read_traceparent
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.api.models.model_apis import ModelApi, ModelApis, meant_api
from moonpool.api.preparation import PreparedCall
from moonpool.api.serving_backend import ApiOptions, RequestRefused
from moonpool.config.tables import Config
from moonpool.discovery.endpoint import Endpoint, Listing, Notice
from moonpool.discovery.rank_counts import RankCounts
from moonpool.epp.call_headers import CallTerms, read_program, read_terms, request_id_of
from moonpool.epp.client_salts import salted_tenant
from moonpool.epp.endpoint_worker import PickerShared
from moonpool.epp.members import Members
from moonpool.epp.routed_call import Route, RoutedCall
from moonpool.head.answers import ResponseStream
from moonpool.head.head import ClusterHead
from moonpool.head.models.model_loading import ApiModel
from moonpool.head.models.served_model import ServedModel
from moonpool.log_limit import limited_logger
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import COMPLETIONS, MEDIA_PATHS, POOLING_PATHS
from moonpool.types import (
    FinishReason,
    InstanceId,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Slo,
)

SETTLE_S = 5.0
"""Time within which the Conductor hears the end of a response."""


class BookedAnswer:
    """One answer of a call, which is a request to the Conductor. The answer is booked as soon as it
    is made."""

    def __init__(
        self, picker: Picker, model: ServedModel, request: Request, call: ForwardedCall
    ) -> None:
        """Raises ApiError and RequestRefused."""
        self._picker, self._model = picker, model
        self.request_id: RequestId = request.request_id
        self.call = RoutedCall(self._partner, self._abandon)
        self.stream: ResponseStream | None = None
        picker.shared.desk.add(self.request_id, self.call)
        try:
            self.stream = picker.head.begin(
                model, request, call=call, on_refused=self.call.on_refused
            )
        except BaseException:
            self.end()
            raise

    async def settle(self) -> None:
        """Ends the answer when the Conductor has heard of the last token, after SETTLE_S at the
        latest."""
        assert self.stream is not None
        try:
            async with asyncio.timeout(SETTLE_S):
                while (await self.stream.next_output()).finish_reason is None:
                    pass
        except (TimeoutError, RequestRefused):
            pass
        finally:
            self.end()

    def end(self) -> None:
        self._picker.shared.desk.remove(self.request_id)
        if self.stream is not None:
            self._picker.head.close(self._model, self.request_id)

    def _partner(self) -> Endpoint:
        attempt = self._model.conductor.requests[self.request_id].attempt
        assert attempt is not None
        return self._picker.endpoint(attempt.decoder)

    def _abandon(self, reason: str) -> None:
        self._picker.head.abort(self.request_id, reason, self._model)


class Picked:
    """Call `close` when the gateway is done with it. The response belongs to all answers together,
    so its parts are attributed to the answers in turn."""

    def __init__(self, picker: Picker, route: Route, answers: Sequence[BookedAnswer]) -> None:
        self._picker, self._answers = picker, tuple(answers)
        self._route = route
        self._turn = 0
        self._is_closed = False

    @property
    def request_id(self) -> RequestId:
        return self._answers[0].request_id

    def begin(self) -> None:
        """Notes that the response has begun."""
        for answer in self._answers:
            answer.call.begin()

    def note(self, num_tokens: int, finish: FinishReason | None = None) -> None:
        """Notes that more tokens were seen."""
        count = len(self._answers)
        for place, answer in enumerate(self._answers):
            own = (num_tokens + (place - self._turn) % count) // count
            if own or finish is not None:
                answer.call.note(own, finish)
        self._turn = (self._turn - num_tokens) % count

    def fail(self, message: str, status: int) -> None:
        for answer in self._answers:
            answer.call.fail(message, status)

    def note_served(self, address: str) -> None:
        """Notes which endpoint responds, as the gateway says. Only the first server of a call has a
        booking; if another one serves it, the first has failed."""
        if address != self._route.endpoint.address:
            self.fail(f"the gateway went on to {address}", 502)
            self.close()

    def finish(self) -> None:
        """Notes that the response was complete. Its answers end when the Conductor has received
        their last tokens."""
        if not self._is_closed:
            self._is_closed = True
            for answer in self._answers:
                self._picker.keep(answer.settle())

    def close(self) -> None:
        """Notes that nobody waits for the response any more. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for answer in self._answers:
                answer.end()


log = limited_logger("moonpool.epp")

GENERATING = (COMPLETIONS, *MEDIA_PATHS)
NO_ENDPOINT_RETRY_S = 5.0
UNHURRIED = Slo(ttft_s=math.inf, tbt_s=math.inf, ttft_stated=False, tbt_stated=False)
"""The SLO of the further answers of a call, which go where the first one goes."""


class NoEndpointError(RequestRefused):
    """The endpoints that a gateway allows are unknown here, or there are none."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "no_instance", message, NO_ENDPOINT_RETRY_S)


class Picker:
    """Call `start`, then `update` with what a source lists, and `pick`. `stop` ends the picker."""

    def __init__(
        self,
        config: Config,
        options: ApiOptions,
        api_key: str = "",
        num_fallbacks: int = 0,
        loaded: ApiModel | None = None,
    ) -> None:
        """`num_fallbacks`: number of further endpoints that the gateway is told with each choice.
        `loaded`: the only model to serve, if the configuration names it, or None if the servers
        name their models."""
        self._num_fallbacks = num_fallbacks
        self.head = ClusterHead(config, loaded, b"")
        self.models = ModelApis(self.head, options)
        self.shared = PickerShared(self.head, api_key, self.head.now)
        self.members = Members(self.shared, config.api.drain_seconds)
        self.max_body_bytes = config.api.max_body_bytes
        self.listing = Listing()
        self._rank_counts = RankCounts()
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._named = Notice(log)

    async def start(self) -> None:
        await self.head.start(None)
        self.keep(self._rank_counts.follow(lambda: self.listing.endpoints, self._use_listed))

    async def stop(self) -> None:
        await self.head.stop()
        await self.members.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.models.close()

    def update(self, listing: Listing) -> None:
        """Takes what the source lists."""
        named = [each.name for each in listing.endpoints if not each.has_ip]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        self._named.say(
            f"{named[0]}{more}: left out, for a gateway takes IP addresses, and no host names"
            if named
            else ""
        )
        self.listing = listing
        self._use_listed()

    def _use_listed(self) -> None:
        """Uses one endpoint for each data-parallel rank of a mixed server, because a header of the
        call can name the rank. A prefill or decode server is one endpoint, because its sidecar
        takes no number of a rank."""
        found: list[Endpoint] = []
        for each in self.listing.endpoints:
            if each.has_ip:
                ranks = self._rank_counts.ranks_of(each) or ()
                found += ranks if each.role is Role.MIXED else (each,)
        self.members.update(found)

    def endpoint(self, instance_id: InstanceId) -> Endpoint:
        found = self.members.find(instance_id)
        assert found is not None, instance_id
        return found

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the background, to its end or until `stop`."""
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
        """Decides where a call goes. `subset`: the addresses that the gateway allows, or None if it
        allows all addresses. A call that computes nothing is not booked (None).

        Raises ApiError and RequestRefused.
        """
        within = self._within(subset)
        if path not in GENERATING and path not in POOLING_PATHS:
            return self._next(within), None
        api = self._api(raw, path)
        model = api.backend
        assert isinstance(model, ServedModel)
        arrived_s = self.head.now()
        terms = read_terms(headers, model.slo, self.head.request_timeout_s, self.listing.objectives)
        kind: Kind = "routed" if path in MEDIA_PATHS else "pooling"
        prepared = await api.bodies.call(kind, raw, "", terms.timeout_s)
        request_id = self._new_id(headers)
        call = _forwarded(path, prepared)
        request = self._request(request_id, model, terms, arrived_s, prepared, call)
        generates = path in GENERATING
        program = read_program(headers, prepared.original) if generates else None
        traceparent = headers.get("traceparent", "").encode("ascii", "replace")
        trace = read_traceparent(traceparent, self._options.exports_traces)
        num_answers = prepared.original.num_answers if generates else 1
        name = request_id if num_answers > 1 else ""
        request = replace(request, within=within, trace=trace, call=name, program=program)
        answers = [BookedAnswer(self, model, request, call)]
        try:
            route = await answers[0].call.chosen
            for number in range(1, num_answers):
                answers.append(self._further(model, request, call, route, number))
        except BaseException:
            for answer in answers:
                answer.end()
            raise
        route = replace(route, fallbacks=self._fallbacks(model, route, within))
        return route, Picked(self, route, answers)

    def _further(
        self, model: ServedModel, request: Request, call: ForwardedCall, route: Route, number: int
    ) -> BookedAnswer:
        """Books another answer to a call that was placed."""
        places = [place for place in (route.prefill, route.endpoint) if place is not None]
        own = replace(
            request,
            request_id=self._free_id(f"{request.request_id}-{number}"),
            within=tuple(InstanceId(place.name) for place in places),
            slo=UNHURRIED,
        )
        answer = BookedAnswer(self, model, own, call)
        answer.call.chosen.add_done_callback(_read)
        return answer

    def _fallbacks(
        self, model: ServedModel, route: Route, within: Sequence[InstanceId] | None
    ) -> tuple[Endpoint, ...]:
        """Returns the endpoints to which the gateway may go if the chosen one does not respond:
        those with the least work."""
        if not self._num_fallbacks or route.endpoint.rank is not None:
            return ()  # none, because the fallbacks would get the number of the rank, too
        fitting = [
            (len(state.prefills) + len(state.decodes), name)
            for name, state in model.conductor.instances.items()
            if state.drain is None
            and name != route.endpoint.name
            and name not in self.shared.suspects
            and self.endpoint(name).rank is None
            and (within is None or name in within)
            and self.endpoint(name).role.decodes
        ]
        return tuple(self.endpoint(name) for _, name in sorted(fitting)[: self._num_fallbacks])

    def _api(self, raw: bytes, path: str) -> ModelApi:
        """Returns the model that a call means by its body. Raises ApiError (404), RequestRefused
        (503)."""
        apis = self.models.all()
        if not apis:
            raise NoEndpointError("No endpoint is ready yet. Send the request again later.")
        return apis[0] if len(apis) == 1 else meant_api(apis, raw, path)

    def _new_id(self, headers: Mapping[str, str]) -> RequestId:
        """Returns the id of a new request: two calls may share their `x-request-id`, but requests
        may not."""
        return self._free_id(request_id_of(headers))

    def _free_id(self, wanted: str) -> RequestId:
        taken = RequestId(wanted) in self.shared.desk
        return RequestId(request_id_of({}) if taken else wanted)

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
            tenant=salted_tenant(terms.payer, body.cache_salt),
            adapter=model.card.adapter_of(body.model),
            priority=terms.priority,
            # An answer teaches something only if its prompt and its first token are known.
            forwarded=not (call.is_exact and call.tells_first_token),
            pinned=True,
        )

    # Endpoints

    def _within(self, subset: Sequence[str] | None) -> tuple[InstanceId, ...] | None:
        """Returns the instances that may serve a call; None means all. Raises RequestRefused."""
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
        """Like `pick`, for a call whose body is not seen, and without booking it. Raises
        RequestRefused."""
        return self._next(self._within(subset))

    def _next(self, within: Sequence[InstanceId] | None) -> Route:
        """Returns an endpoint that is up, one after another."""
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


def _read(chosen: asyncio.Future[Route]) -> None:
    """Reads the outcome of a further answer, so that asyncio does not log a refusal as unread. Its
    destination is known, and a refusal does not concern the call, which continues."""
    if not chosen.cancelled():
        chosen.exception()


def _forwarded(path: str, prepared: PreparedCall) -> ForwardedCall:
    body: ForwardedBody = prepared.original
    streams = bool(body.stream) and path in GENERATING
    return ForwardedCall(path=path, body=b"", is_exact=prepared.is_exact, tells_first_token=streams)

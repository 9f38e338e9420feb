"""Replicas that come and go, and the ingresses that send requests to them."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from app.simulation.event_loop import EventLoop
from app.simulation.news import NewsStream, NewsTimes
from app.simulation.replica import SimulatedReplica
from app.simulation.routers import Router
from app.simulation.step_cost import StepCost
from app.transport import StreamItem
from engine import CoreStep, EngineConfig, EngineOutput, EngineRequest


class MemberState(enum.Enum):
    """STARTING → SERVING → DRAINING → GONE; STARTING → GONE where it is drained before it served."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class Member:
    """The life of a replica of the fleet.

    Attributes:
        added_at, serving_at, drained_at, gone_at: when it was asked for, took requests, took no more, and ended.
    """

    added_at: float
    state: MemberState = MemberState.STARTING
    serving_at: float | None = None
    drained_at: float | None = None
    gone_at: float | None = None


@dataclass(slots=True)
class Record:
    """What became of a request. Times in virtual seconds, None until they come.

    Attributes:
        arrival: at its ingress.
        routed_at: later than that where no replica was there.
        first_token_at, finished_at: the ends of the steps that gave the first token and the last one.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    request: EngineRequest
    arrival: float
    ingress: int
    routed_at: float | None = None
    replica_id: str | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the arrival; what messages take on their way is not in it."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival


class _Ingress:
    """One router, and the requests that wait for a replica to be there."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.waiting: deque[Record] = deque()


class Fleet:
    """A deployment and its ingresses on one virtual clock.

    Args:
        loop: virtual time; whoever owns the fleet runs it.
        config: of each replica's engine, with num_kv_blocks.
        max_model_len: longest prompt and output together, in tokens.
        cost: of a step; a replica may have another one.
        routers: one for each ingress; requests are dealt to these in turn.

    Attributes:
        members: all replicas that there are or were, by id.
        replicas: those that there are.
        ongoing: requests of each replica that have not ended as far as their ingresses know.
        records: of all requests that have arrived, by id.
        num_unfinished: requests that were submitted and have not ended, those that are yet to arrive included.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        config: EngineConfig,
        max_model_len: int,
        cost: StepCost,
        routers: Sequence[Router],
        news: NewsTimes | None = None,
    ) -> None:
        self._loop = loop
        self._config = config
        self._max_model_len = max_model_len
        self._cost = cost
        self._news = news or NewsTimes()
        self._ingresses = [_Ingress(router) for router in routers]
        self._streams: dict[str, list[NewsStream]] = {}
        self._starting: list[str] = []
        self._serving: list[str] = []
        self._turn = 0
        self.members: dict[str, Member] = {}
        self.replicas: dict[str, SimulatedReplica] = {}
        self.ongoing: Counter[str] = Counter()
        self.records: dict[str, Record] = {}
        self.num_unfinished = 0

    # ---- replicas ----

    @property
    def starting(self) -> Sequence[str]:
        """Ids of the replicas that will take requests once they are up, oldest first."""
        return self._starting

    @property
    def serving(self) -> Sequence[str]:
        """Ids of the replicas that take requests, oldest first."""
        return self._serving

    def add_replica(self, *, startup_s: float = 0.0, cost: StepCost | None = None) -> str:
        """Starts a replica, which takes requests after its start-up. Returns its id."""
        replica_id = f"replica-{len(self.members)}"
        self.replicas[replica_id] = SimulatedReplica(
            replica_id,
            self._loop,
            config=self._config,
            max_model_len=self._max_model_len,
            cost=cost or self._cost,
            on_submit=self._note_submitted,
            on_step=self._after_step,
        )
        self.members[replica_id] = Member(self._loop.now)
        self._starting.append(replica_id)
        if startup_s > 0:
            self._loop.at(self._loop.now + startup_s, partial(self._serve, replica_id))
        else:
            self._serve(replica_id)
        return replica_id

    def drain(self, replica_id: str) -> None:
        """Lets a replica end once its requests have; one that is starting ends at once."""
        member = self.members[replica_id]
        if member.state is MemberState.STARTING:
            member.drained_at = self._loop.now
            self._starting.remove(replica_id)
            self._remove(replica_id)
        elif member.state is MemberState.SERVING:
            member.state, member.drained_at = MemberState.DRAINING, self._loop.now
            self._serving.remove(replica_id)
            self._publish()
            self._remove_if_done(replica_id)

    # ---- requests ----

    @property
    def num_waiting(self) -> int:
        """Requests that wait at an ingress since no replica is there."""
        return sum(len(ingress.waiting) for ingress in self._ingresses)

    def submit(self, request: EngineRequest) -> None:
        """A request that arrives at its arrival_time."""
        self.num_unfinished += 1
        self._loop.at(request.arrival_time, partial(self._arrive, request))

    def _arrive(self, request: EngineRequest) -> None:
        turn = self._turn % len(self._ingresses)
        self._turn += 1
        record = self.records[request.request_id] = Record(request, self._loop.now, turn)
        self._ingresses[turn].waiting.append(record)
        self._route(self._ingresses[turn])

    def _route(self, ingress: _Ingress) -> None:
        while ingress.waiting and self._serving:
            record = ingress.waiting.popleft()
            requests, call_id = (record.request,), record.request.request_id
            ingress.router.begin(call_id, requests)
            record.replica_id = ingress.router.choose(call_id, self._serving)[0]
            record.routed_at = self._loop.now
            ingress.router.assign(call_id, record.replica_id, accepted=True)
            self.ongoing[record.replica_id] += 1
            self.replicas[record.replica_id].submit(requests)

    # ---- what replicas tell ----

    def _serve(self, replica_id: str) -> None:
        member = self.members[replica_id]
        if member.state is not MemberState.STARTING:
            return  # drained meanwhile
        member.state, member.serving_at = MemberState.SERVING, self._loop.now
        self._starting.remove(replica_id)
        self._serving.append(replica_id)
        self._publish()
        load = self.replicas[replica_id].core.load()
        self._streams[replica_id] = [
            NewsStream(self._loop, self._news, partial(self._receive, ingress, replica_id), load)
            for ingress in self._ingresses
        ]
        for ingress in self._ingresses:
            self._route(ingress)

    def _note_submitted(self, request: EngineRequest, number: int) -> None:
        record = self.records[request.request_id]
        assert record.replica_id is not None
        self._streams[record.replica_id][record.ingress].note_submitted(number, request.request_id)

    def _after_step(self, replica_id: str, step: CoreStep) -> None:
        streams = self._streams[replica_id]
        for output in step.outputs:
            record = self.records[output.request_id]
            streams[record.ingress].take(output)
            self._note(record, output)
        for stream in streams:
            stream.after_step(step)
        self._remove_if_done(replica_id)

    def _note(self, record: Record, output: EngineOutput) -> None:
        record.num_output_tokens += len(output.new_token_ids)
        if output.new_token_ids and record.first_token_at is None:
            record.first_token_at = self._loop.now
            record.num_cached_tokens = output.num_cached_tokens
        if output.finished:
            record.finished_at = self._loop.now
            self.num_unfinished -= 1

    def _receive(self, ingress: _Ingress, replica_id: str, item: StreamItem) -> None:
        if ingress.router.receive(replica_id, item):
            assert item.kv_seq == 0, "only the beginning of a stream can miss something"
            ingress.router.restore_blocks(replica_id, 0, ())
        for output in item.outputs:
            if output.finished:
                ingress.router.end(output.request_id, (output.request_id,))
                self.ongoing[replica_id] -= 1

    def _publish(self) -> None:
        for ingress in self._ingresses:
            ingress.router.set_members(tuple(self._serving))

    def _remove_if_done(self, replica_id: str) -> None:
        if self.members[replica_id].state is MemberState.DRAINING and self.replicas[replica_id].is_idle:
            self._remove(replica_id)

    def _remove(self, replica_id: str) -> None:
        member = self.members[replica_id]
        member.state, member.gone_at = MemberState.GONE, self._loop.now
        del self.replicas[replica_id]
        self._streams.pop(replica_id, None)  # one that never served has none
        # After its last news.
        for ingress in self._ingresses:
            self._loop.at(self._loop.now + self._news.delay_s, partial(ingress.router.drop, replica_id))

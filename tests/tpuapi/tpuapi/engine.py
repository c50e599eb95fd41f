"""The service's state and clock, what it was asked, and who wants to know of its nodes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from tpuapi.clock import Clock
from tpuapi.core.errors import ApiError
from tpuapi.core.values import Json, NodeEvent, Version
from tpuapi.core.world import World
from tpuapi.faults import Faults, named_in
from tpuapi.machine.advance import advance
from tpuapi.methods.answering import Answer, Call
from tpuapi.wire.methods import METHODS

Hook = Callable[[NodeEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One call as it was answered."""

    method: str
    version: Version
    resource: str
    at: float
    code: str
    """OK, or the code that the caller has got; empty while the call is held."""


class Engine:
    """Carry out calls on one world, one after the other, each at the clock's time."""

    def __init__(self, clock: Clock, world: World) -> None:
        self.clock = clock
        self.world = world
        self.faults = Faults()
        self.hooks: list[Hook] = []
        self.calls: list[LoggedCall] = []
        self.events: list[NodeEvent] = []

    async def invoke(self, method: str, version: Version, request: Json) -> Answer:
        """Answer a call, as faults allow.

        Raises:
            ApiError: The service refuses it, or a fault does.
        """
        logged = LoggedCall(
            method=method, version=version, resource=named_in(request), at=self.clock.now(), code=""
        )
        index = len(self.calls)
        self.calls.append(logged)
        try:
            await self.faults.wait(method)
            answer = self._answer(method, version, request)
            await self.faults.wait_held(method, after_commit=True)
        except ApiError as error:
            self.calls[index] = replace(logged, code=error.status.code.name)
            raise
        self.calls[index] = replace(logged, code="OK")
        return answer

    def advance(self) -> None:
        """Let everything happen that is due by now, and tell the hooks."""
        self.change(lambda world: world)

    def change(self, change: Callable[[World], World]) -> None:
        """Make a change now. An exception of it leaves everything as it was."""
        now = self.clock.now()
        world = change(advance(self.world, now))
        self.world = advance(world, now)
        self._tell()

    def count(self, method: str) -> int:
        """Return how often a method was called, with whatever success."""
        return self.counts()[method]

    def counts(self) -> Counter[str]:
        return Counter(call.method for call in self.calls)

    def _answer(self, method: str, version: Version, request: Json) -> Answer:
        refused = self.faults.take(method, request, after_commit=False)
        if refused is not None:
            raise refused
        answers: list[Answer] = []

        def carry_out(world: World) -> World:
            after, answer = METHODS[method](world, request, Call(version, world.now))
            answers.append(answer)
            return after

        self.change(carry_out)
        lost = self.faults.take(method, request, after_commit=True)
        if lost is not None:
            raise lost
        return answers[0]

    def _tell(self) -> None:
        events, self.world = self.world.events, replace(self.world, events=())
        self.events.extend(events)
        for event in events:
            for hook in self.hooks:
                hook(event)

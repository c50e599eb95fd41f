"""The shape of a method, and what long-running ones share."""

from collections.abc import Callable
from dataclasses import dataclass

from tpuapi.core import operations
from tpuapi.core.names import Location
from tpuapi.core.paging import Page
from tpuapi.core.values import Json, Node, Operation, QueuedResource, Version
from tpuapi.core.world import RequestKey, World

Answer = (
    Operation
    | QueuedResource
    | Node
    | Page[QueuedResource]
    | Page[Node]
    | Page[Json]
    | Page[Operation]
    | None
)
"""What a method answers with; the wire knows how each looks in each version of the API."""

Change = Callable[[World], World]


@dataclass(frozen=True, slots=True)
class Call:
    """How and when a method is called."""

    version: Version
    now: float


Method = Callable[[World, Json, Call], tuple[World, Answer]]
"""method(world, request, call): the world after it, and the answer. Raises ApiError, and then nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A change that a long-running operation makes."""

    method: str
    verb: str
    target: str
    location: Location


def run(
    world: World, request: Json, call: Call, work: Work, change: Callable[[World], World]
) -> tuple[World, Operation]:
    """Make the change once, however often it is asked for under one request id.

    Args:
        world: What there is.
        request: The request; `request_id` is read.
        call: How it came.
        work: What is done to what.
        change: Check and make the change. An ApiError of it is the answer, and isn't remembered.

    Returns:
        The world, and the operation that this request, or the same one before, has begun.
    """
    key = RequestKey(work.method, work.target, request.get("request_id", ""))
    before = operations.find_answered(world, key, request)
    if before is not None:
        return world, before
    changed = change(world)
    begun, operation = operations.begin(
        changed, work.verb, work.target, work.location, call.version, call.now
    )
    return operations.remember(begun, key, request, operation, call.now), operation

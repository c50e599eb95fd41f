"""Long-running operations, and requests that were carried out before."""

import uuid
from dataclasses import replace

from tpuapi.core.errors import Status, invalid
from tpuapi.core.names import OPERATIONS, Location
from tpuapi.core.values import Json, Node, Operation, QueuedResource, Version
from tpuapi.core.world import Answered, RequestKey, World


def begin(
    world: World, verb: str, target: str, location: Location, version: Version, now: float
) -> tuple[World, Operation]:
    """Start an operation on a target."""
    world, number = world.numbered()
    operation = Operation(
        name=location.name(OPERATIONS, f"operation-{int(now * 1000)}-{number:012x}"),
        location=location,
        verb=verb,
        target=target,
        version=version,
        create_time=now,
    )
    return world.with_operation(operation), operation


def finish(
    world: World,
    target: str,
    verbs: tuple[str, ...],
    now: float,
    *,
    error: Status | None = None,
    result: QueuedResource | Node | None = None,
) -> World:
    """End the operations of these verbs on the target that haven't ended, well or with an error."""
    for operation in world.operations.values():
        if operation.target == target and operation.verb in verbs and operation.end_time is None:
            ended = replace(operation, end_time=now, error=error, result=None if error else result)
            world = world.with_operation(ended)
    return world


def fail_later(world: World, operation: Operation, now: float) -> tuple[World, Operation]:
    """Let a deletion's operation end with the first of the errors that were put there, as late as a deletion would."""
    failure, *rest = world.failing_deletions
    failing = replace(operation, failure=failure, due=now + world.timings.deleting_s)
    return replace(world.with_operation(failing), failing_deletions=tuple(rest)), failing


def find_answered(world: World, key: RequestKey, request: Json) -> Operation | None:
    """Return the operation of the same request, made before under the same id.

    Raises:
        ApiError: The id is no UUID, or was used for a request that differs; INVALID_ARGUMENT.
    """
    if not key.request_id:
        return None
    _check_uuid(key.request_id)
    answered = world.answered.get(key)
    if answered is None:
        return None
    if answered.request != request:
        raise invalid("request_id", f"'{key.request_id}' was used before for a request that differs")
    return world.operations.get(answered.operation)


def remember(world: World, key: RequestKey, request: Json, operation: Operation, now: float) -> World:
    """Keep which operation answered the request; requests without an id are not kept."""
    if not key.request_id:
        return world
    answered = Answered(request=request, operation=operation.name, at=now)
    return replace(world, answered={**world.answered, key: answered})


def forget_old(world: World, now: float) -> World:
    """Forget ids and operations that are older than the service remembers."""
    ids_from = now - world.timings.request_id_memory_s
    ended_from = now - world.timings.operation_memory_s
    old_ids = [key for key, answered in world.answered.items() if answered.at < ids_from]
    old = [o.name for o in world.operations.values() if o.end_time is not None and o.end_time < ended_from]
    if not old_ids and not old:
        return world
    return replace(
        world,
        answered={key: value for key, value in world.answered.items() if key not in old_ids},
        operations={key: value for key, value in world.operations.items() if key not in old},
    )


def _check_uuid(request_id: str) -> None:
    try:
        value = uuid.UUID(request_id)
    except ValueError:
        raise invalid("request_id", f"'{request_id}' is not a UUID") from None
    if value.int == 0:
        raise invalid("request_id", "the zero UUID is not supported")

"""Take the cloud's answers into the status: to requests of ours, of operations, and errors of lists. Pure."""

from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudError,
    CloudOperation,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.observed import Outcome, Verb
from stepkeeper_operator.queued_resources.sight import Scene, Sight

__all__ = ["LASTING", "book", "describe_error", "error_kind", "fold_answers", "name_error", "waits_to_delete"]

LASTING: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}
"""Errors that stay until somebody changes something."""

_MESSAGE_LIMIT: Final = 2048


def book(status: QueuedResourceStatus, **changes: Any) -> QueuedResourceStatus:
    """Return the status with changes of its own fields, and of those of the operator's private state."""
    own = {name: changes.pop(name) for name in tuple(changes) if name in QueuedResourceStatus.model_fields}
    return status.model_copy(update={**own, "operator": status.operator.model_copy(update=changes)})


def error_kind(status: QueuedResourceStatus) -> ErrorKind | None:
    """Return what the last error means; None: there is none."""
    if status.error is None:
        return None
    kinds = {kind.value: kind for kind in ErrorKind}
    return kinds.get(status.error.kind, ErrorKind.TRANSIENT)


def name_error(code: str, message: str) -> str:
    """Render an error of the cloud, which may have no message."""
    return f"{code}: {message or 'the cloud gives no details'}"


def describe_error(status: QueuedResourceStatus) -> str:
    """Describe the last error in the API's words, and of a deletion when it is asked for again."""
    error, due = status.error, status.next_try_time
    if error is None:
        return "an error"
    text = name_error(error.code, error.message)
    if error.verb != Verb.DELETE or due is None:
        return text
    return f"the next request is sent at {render_time(due)}, after {text}"  # texts are cut at their ends


def waits_to_delete(status: QueuedResourceStatus, *, now: float) -> bool:
    """Return True until the time at which a deletion that has failed is asked for again."""
    error, due = status.error, status.next_try_time
    return error is not None and error.verb == Verb.DELETE and due is not None and now < due


def fold_answers(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status with all answers of the cloud in it."""
    status = _fold_listing(status, scene)
    if scene.observed.outcome is not None:
        status = _fold_outcome(status, scene.observed.outcome, scene)
    return _fold_operation(status, scene)


def _fold_listing(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    error, listing = scene.observed.error, scene.observed.listing
    if listing is None:
        # A passing error of a list isn't shown: it would be written to each of the place's resources.
        if error is None or error.kind not in LASTING or waits_to_delete(status, now=scene.now):
            return status
        return _show_error(status, error, Verb.LIST, now=scene.now)
    known = status.operator
    made = scene.sight.resource is not None and not (known.adopted or known.adopting or status.was_seen)
    if made and known.asked_at is not None and listing.asked_at >= known.asked_at:
        status = book(status, asked_at=None)  # it was carried out: a repeated request makes no second one
    if status.error is None:
        return status
    if status.error.verb == Verb.LIST:  # the time of the next creation stands
        return status.model_copy(update={"error": None})
    return _clear_error(status) if _is_over(status, scene.sight) else status


def _is_over(status: QueuedResourceStatus, sight: Sight) -> bool:
    """Return True where a list shows that the request which got the last error has nothing more to do."""
    match status.error and status.error.verb:
        case Verb.CREATE:
            return sight.resource is not None
        case Verb.LABEL:
            return not sight.unlabelled and not sight.others
        case Verb.DELETE:  # an emptied status wants nothing gone any more
            return not sight.strays and not (sight.resource is not None and status.removing)
        case _:
            return False


def _fold_outcome(status: QueuedResourceStatus, outcome: Outcome, scene: Scene) -> QueuedResourceStatus:
    error = outcome.error
    if outcome.verb is Verb.CREATE and (error is None or error.kind is not ErrorKind.TRANSIENT):
        status = book(status, asked_at=None)  # else it may still be carried out
    if error is not None:
        return _record_error(status, error, outcome.verb, scene)
    deletes, known = outcome.verb is Verb.DELETE, status.error
    if not deletes or (
        known is not None and known.verb == Verb.DELETE
    ):  # else the time of the next creation stands
        retries = status.operator.retries if deletes else 0  # its operation may fail yet
        status = book(_clear_error(status), retries=retries)
    if outcome.verb is Verb.CREATE:
        status = status.model_copy(update={"state": QueuedResourceState.CREATING})
    if deletes and status.removing:
        status = status.model_copy(update={"state": QueuedResourceState.DELETING})
    if not outcome.operation:
        return status
    operation = CloudOperation(name=outcome.operation, verb=outcome.verb.value, start_time=int(outcome.at))
    return status.model_copy(update={"operation": operation})


def _fold_operation(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """End an operation that is done. What it did is judged together with a listing, so it waits for one."""
    operation, answer, sight = status.operation, scene.observed.operation, scene.sight
    if operation is None or not sight.known:
        return status
    if answer is not None and (answer.name != operation.name or not answer.done):
        answer = None
    is_old = scene.now - operation.start_time >= scene.settings.operation_s
    if answer is None and not is_old and not _is_settled(operation, sight):
        return status
    status = status.model_copy(update={"operation": None})
    error, removing = None if answer is None else answer.error, bool(status.removing)
    if operation.verb == Verb.CREATE:
        if error is None or removing or not sight.absent:
            return status  # a resource that exists shows by its state what became of it
        # The next one has another number: the API may answer the same request with the same failed operation.
        status = book(status, created=False, number=status.operator.number + 1, asked_at=None)
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
        return _record_error(status, error, Verb.CREATE, scene)
    stays = sight.resource is not None and sight.resource.state != "DELETING"
    if error is None and removing and stays:
        text = "its deletion is over, but the resource still exists"
        error = CloudTPUError(ErrorKind.BUSY, "ABORTED", text)
    return status if error is None else _record_error(status, error, Verb.DELETE, scene)


def _is_settled(operation: CloudOperation, sight: Sight) -> bool:
    """Return True where the resource itself shows that the operation is over, whether it can be read or not."""
    if operation.verb == Verb.DELETE:
        return sight.absent
    return sight.resource is not None and sight.resource.state != "CREATING"


def _record_error(
    status: QueuedResourceStatus, error: CloudTPUError, verb: Verb, scene: Scene
) -> QueuedResourceStatus:
    """Return the status with the error, and with the time of the next try."""
    # Machines cost money until they are deleted: a refused deletion doesn't wait for somebody to change something.
    kind = ErrorKind.TRANSIENT if verb is Verb.DELETE else error.kind
    quota = kind is ErrorKind.QUOTA
    retries, n_quota = status.operator.retries + 1, status.operator.quota_failures + quota
    wait_s = scene.settings.compute_retry_s(kind, n_quota if quota else retries)
    status = _show_error(status, error, verb, now=scene.now)
    return book(status, retries=retries, quota_failures=n_quota, next_try_time=int(scene.now + wait_s))


def _show_error(
    status: QueuedResourceStatus, error: CloudTPUError, verb: Verb, *, now: float
) -> QueuedResourceStatus:
    before = status.error
    same = before is not None and (before.code, before.kind, before.verb) == (error.code, error.kind, verb)
    shown = CloudError(
        code=error.code,
        message=error.message[:_MESSAGE_LIMIT],
        kind=error.kind.value,
        verb=verb.value,
        time=before.time if same and before is not None else int(now),
    )
    return status.model_copy(update={"error": shown})


def _clear_error(status: QueuedResourceStatus) -> QueuedResourceStatus:
    return book(status, error=None, retries=0, next_try_time=None)

"""Fold the cloud's answers into the status: results of requests and operations, and errors of lists. Pure."""

from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudError,
    CloudOperation,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.cloud_view import CloudView, View
from stepkeeper_operator.queued_resources.observed import Outcome, Verb

__all__ = [
    "PERMANENT",
    "describe_blindness",
    "describe_error",
    "error_kind",
    "fold_answers",
    "name_error",
    "update_status",
    "waits_to_delete",
]

PERMANENT: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}
"""Errors that stay until a person changes something."""

_MESSAGE_LIMIT: Final = 2048


def update_status(status: QueuedResourceStatus, **changes: Any) -> QueuedResourceStatus:
    """Return the status with changed fields: those of the status itself, and those of `operator`, its private state."""
    direct = {name: changes.pop(name) for name in tuple(changes) if name in QueuedResourceStatus.model_fields}
    return status.model_copy(update={**direct, "operator": status.operator.model_copy(update=changes)})


def error_kind(status: QueuedResourceStatus) -> ErrorKind | None:
    """Return the kind of the last error; None: there is none."""
    if status.error is None:
        return None
    kinds = {kind.value: kind for kind in ErrorKind}
    return kinds.get(status.error.kind, ErrorKind.TRANSIENT)


def name_error(code: str, message: str) -> str:
    """Render an error of the cloud, which may have no message."""
    return f"{code}: {message or 'the cloud gives no details'}"


def describe_error(status: QueuedResourceStatus) -> str:
    """Describe the last error with the API's message, and for a deletion the time of the next request."""
    error, due = status.error, status.next_try_time
    if error is None:
        return "an error"
    when = "" if error.verb != Verb.DELETE or due is None else render_time(due)
    text = name_error(error.code, error.message)  # a long one is cut at the end
    return f"the next request is sent at {when}, after {text}" if when else text


def describe_blindness(error: CloudTPUError | None, *, again_s: float) -> str:
    """Describe that there is no list of the cloud's resources, and when the next one is requested."""
    why = "" if error is None else f" ({error})"
    return f"the cloud can't be read{why}; it is read again every {again_s:.0f} s"


def waits_to_delete(status: QueuedResourceStatus, *, now: float) -> bool:
    """Return True until a failed deletion is due for a retry."""
    error, due = status.error, status.next_try_time
    return error is not None and error.verb == Verb.DELETE and due is not None and now < due


def fold_answers(status: QueuedResourceStatus, view: View) -> QueuedResourceStatus:
    """Return the status updated with all answers of the cloud."""
    status = _fold_listing(status, view)
    if view.observed.outcome is not None:
        status = _fold_outcome(status, view.observed.outcome, view)
    return _fold_operation(status, view)


def _fold_listing(status: QueuedResourceStatus, view: View) -> QueuedResourceStatus:
    error, listing = view.observed.error, view.observed.listing
    if listing is None:
        # A transient error would be written to all objects of the place. A failed deletion's own error is kept.
        if error is None or error.kind not in PERMANENT or waits_to_delete(status, now=view.now):
            return status
        return _show_error(status, error, Verb.LIST, now=view.now)
    operator = status.operator
    made = view.cloud.resource is not None and not (operator.adopted or operator.adopting or status.was_seen)
    if made and operator.asked_at is not None and listing.asked_at >= operator.asked_at:
        # The request to create it was carried out, and creates no second one later.
        status = update_status(status, asked_at=None)
    if status.error is None:
        return status
    if status.error.verb == Verb.LIST:  # keep the time of the next creation
        return status.model_copy(update={"error": None})
    return _clear_error(status) if _is_over(status, view.cloud) else status


def _is_over(status: QueuedResourceStatus, cloud: CloudView) -> bool:
    """Return True if a list shows that the request with the last error is no longer needed."""
    match status.error and status.error.verb:
        case Verb.CREATE:
            return cloud.resource is not None
        case Verb.LABEL:
            return not cloud.unlabeled and not cloud.others
        case Verb.DELETE:  # the current one is deleted only in a removal
            return not cloud.duplicates and not (cloud.resource is not None and status.removing)
        case _:
            return False


def _fold_outcome(status: QueuedResourceStatus, outcome: Outcome, view: View) -> QueuedResourceStatus:
    error = outcome.error
    # After a transient error, the request may still be carried out.
    if outcome.verb is Verb.CREATE and (error is None or error.kind is not ErrorKind.TRANSIENT):
        status = update_status(status, asked_at=None)
    if error is not None:
        return _record_error(status, error, outcome.verb, view)
    deletes, known = outcome.verb is Verb.DELETE, status.error
    # A deletion that was accepted doesn't clear the error of a creation, which has a time of the next try.
    if not deletes or (known is not None and known.verb == Verb.DELETE):
        retries = status.operator.retries if deletes else 0  # its operation can still fail
        status = update_status(_clear_error(status), retries=retries)
    if outcome.verb is Verb.CREATE:
        status = status.model_copy(update={"state": QueuedResourceState.CREATING})
    if deletes and status.removing:
        status = status.model_copy(update={"state": QueuedResourceState.DELETING})
    if not outcome.operation:
        return status
    operation = CloudOperation(name=outcome.operation, verb=outcome.verb.value, start_time=int(outcome.at))
    return status.model_copy(update={"operation": operation})


def _fold_operation(status: QueuedResourceStatus, view: View) -> QueuedResourceStatus:
    """Finish an operation that is done. Its result is judged together with a listing, so wait for one."""
    operation, answer, cloud = status.operation, view.observed.operation, view.cloud
    if operation is None or not cloud.known:
        return status
    if answer is not None and (answer.name != operation.name or not answer.done):
        answer = None
    is_old = view.now - operation.start_time >= view.settings.operation_s
    if answer is None and not is_old and not _is_settled(operation, cloud):
        return status
    status = status.model_copy(update={"operation": None})
    error, removing = None if answer is None else answer.error, bool(status.removing)
    if operation.verb == Verb.CREATE:
        if error is None or removing or not cloud.absent:
            return status  # the state of an existing resource shows the result
        # The next one gets another number: the API may answer the same request with the same failed operation.
        state, number = QueuedResourceState.PENDING, status.operator.number + 1
        status = update_status(status, state=state, created=False, number=number, asked_at=None)
        return _record_error(status, error, Verb.CREATE, view)
    stays = cloud.resource is not None and cloud.resource.phase is not QueuedResourceState.DELETING
    if error is None and removing and stays:
        text = "the deletion has finished, but the resource still exists"
        error = CloudTPUError(ErrorKind.BUSY, "ABORTED", text)
    return status if error is None else _record_error(status, error, Verb.DELETE, view)


def _is_settled(operation: CloudOperation, cloud: CloudView) -> bool:
    """Return True if the resource itself shows that the operation has finished."""
    if operation.verb == Verb.DELETE:
        return cloud.absent
    return cloud.resource is not None and cloud.resource.phase is not QueuedResourceState.CREATING


def _record_error(
    status: QueuedResourceStatus, error: CloudTPUError, verb: Verb, view: View
) -> QueuedResourceStatus:
    """Return the status with the error, and with the time of the next try."""
    # Machines cost money until they are deleted: a refused deletion is retried like after a transient error.
    kind = ErrorKind.TRANSIENT if verb is Verb.DELETE else error.kind
    quota = kind is ErrorKind.QUOTA
    retries, n_quota = status.operator.retries + 1, status.operator.quota_failures + quota
    wait_s = view.settings.compute_retry_s(kind, n_quota if quota else retries)
    status = _show_error(status, error, verb, now=view.now)
    next_at = int(view.now + wait_s)
    return update_status(status, retries=retries, quota_failures=n_quota, next_try_time=next_at)


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
    return update_status(status, error=None, retries=0, next_try_time=None)

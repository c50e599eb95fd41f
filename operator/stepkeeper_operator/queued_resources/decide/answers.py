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
from stepkeeper_operator.queued_resources.pacing import compute_retry_s
from stepkeeper_operator.queued_resources.sight import Presence, Scene, Sight

__all__ = ["book", "describe_error", "error_kind", "fold_answers", "waits_to_delete"]

_MESSAGE_LIMIT: Final = 2048
_LASTING: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}


def book(status: QueuedResourceStatus, **changes: Any) -> QueuedResourceStatus:
    """Return the status with changes in its bookkeeping."""
    return status.model_copy(update={"bookkeeping": status.bookkeeping.model_copy(update=changes)})


def error_kind(status: QueuedResourceStatus) -> ErrorKind | None:
    """Return what the last error means; None: there is none."""
    if status.error is None:
        return None
    kinds = {kind.value: kind for kind in ErrorKind}
    return kinds.get(status.error.kind, ErrorKind.TRANSIENT)


def fold_answers(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status with all answers of the cloud in it."""
    status = _fold_listing(status, scene)
    if scene.observed.outcome is not None:
        status = _fold_outcome(status, scene.observed.outcome, scene)
    return _fold_operation(status, scene)


def _record_error(
    status: QueuedResourceStatus, error: CloudTPUError, verb: Verb, scene: Scene
) -> QueuedResourceStatus:
    """Return the status with the error, and with the time of the next try."""
    bookkeeping = status.bookkeeping
    # Machines cost money until they are deleted: a refused deletion doesn't wait for somebody to change something.
    kind = ErrorKind.TRANSIENT if verb is Verb.DELETE else error.kind
    retries, n_quota = bookkeeping.retries + 1, bookkeeping.quota_failures
    if kind is ErrorKind.QUOTA:
        n_quota += 1
    n_tries = n_quota if kind is ErrorKind.QUOTA else retries
    if verb is Verb.DELETE:
        n_tries = bookkeeping.failed_deletions + 1
        status = book(status, failed_deletions=n_tries)
    not_before = int(scene.now + compute_retry_s(kind, n_tries, scene.settings))
    status = _show_error(status, error, verb, now=scene.now)
    return book(status, retries=retries, quota_failures=n_quota, not_before=not_before)


def describe_error(status: QueuedResourceStatus) -> str:
    """Describe the last error in the API's words, and of a deletion when it is asked for again."""
    error, due = status.error, status.bookkeeping.not_before
    if error is None:
        return "an error"
    text = f"{error.code}: {error.message}"
    if error.verb != Verb.DELETE or due is None:
        return text
    return f"the next request is sent at {render_time(due)}, after {text}"  # texts are cut at their ends


def waits_to_delete(status: QueuedResourceStatus, *, now: float) -> bool:
    """Return True until the time at which a deletion that has failed is asked for again."""
    error, due = status.error, status.bookkeeping.not_before
    return error is not None and error.verb == Verb.DELETE and due is not None and now < due


def _fold_listing(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    observed, sight = scene.observed, scene.sight
    if observed.listing is None:
        # A passing error of a list isn't told: it would be written to each of the place's resources.
        lasting = observed.error is not None and observed.error.kind in _LASTING
        if lasting and observed.error is not None and not waits_to_delete(status, now=scene.now):
            return _show_error(status, observed.error, Verb.LIST, now=scene.now)
        return status
    if not sight.strays and not status.bookkeeping.removing:
        status = book(status, failed_deletions=0)
    if _is_request_carried_out(status, scene):
        status = book(status, asked_at=None)
    verb = None if status.error is None else status.error.verb
    if verb == Verb.LIST:  # the time of the next creation stands
        return status.model_copy(update={"error": None})
    created = verb == Verb.CREATE and sight.is_ours
    # Nobody wants it gone any more where somebody has emptied the status in the midst of a removal.
    kept = sight.is_ours and not sight.strays and not status.bookkeeping.removing
    labelled = verb == Verb.LABEL and not sight.unlabelled and not sight.others
    deleted = verb == Verb.DELETE and (kept or sight.presence is Presence.ABSENT)
    return _clear_error(status) if created or deleted or labelled else status


def _is_request_carried_out(status: QueuedResourceStatus, scene: Scene) -> bool:
    """Return True where a list shows for the first time what was asked for, and it was asked for only once.

    Of two requests without an answer, the other one may yet be carried out. After a deletion, nothing would delete what
    it makes.
    """
    bookkeeping, listing = status.bookkeeping, scene.observed.listing
    if bookkeeping.asked_at is None or listing is None or listing.asked_at < bookkeeping.asked_at:
        return False
    unseen = status.state in {None, QueuedResourceState.PENDING}
    made = scene.sight.is_ours and not (bookkeeping.adopted or bookkeeping.adopting)
    return made and unseen and not bookkeeping.asked_again


def _fold_outcome(status: QueuedResourceStatus, outcome: Outcome, scene: Scene) -> QueuedResourceStatus:
    if outcome.verb is Verb.CREATE and not status.bookkeeping.asked_again and _is_answer(outcome):
        status = book(status, asked_at=None)
    if outcome.error is not None:
        return _record_error(status, outcome.error, outcome.verb, scene)
    status = _clear_error(status)
    if outcome.verb is Verb.CREATE:
        status = status.model_copy(update={"state": QueuedResourceState.CREATING})
    if not outcome.operation:
        return status
    operation = CloudOperation(name=outcome.operation, verb=outcome.verb.value, start_time=int(outcome.at))
    return status.model_copy(update={"operation": operation})


def _fold_operation(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """End an operation that is done. What it did is judged together with a listing, so it waits for one."""
    operation, answer, sight = status.operation, scene.observed.operation, scene.sight
    if operation is None or sight.presence is Presence.UNKNOWN:
        return status
    if answer is not None and (answer.name != operation.name or not answer.done):
        answer = None
    gone_on_s = scene.now - operation.start_time
    if answer is None and gone_on_s < scene.settings.operation_s and not _is_settled(operation, sight):
        return status
    status = status.model_copy(update={"operation": None})
    removing = bool(status.bookkeeping.removing)
    error = None if answer is None else answer.error
    if operation.verb == Verb.CREATE:
        # A resource that exists tells by its state what became of it.
        failed = error is not None and sight.presence is Presence.ABSENT and not removing
        return _fold_failed_creation(status, error, scene) if failed and error is not None else status
    if error is None and removing and _is_still_there(sight):
        text = "its deletion is over, but the resource still exists"
        error = CloudTPUError(ErrorKind.BUSY, "ABORTED", text)
    return status if error is None else _record_error(status, error, Verb.DELETE, scene)


def _fold_failed_creation(
    status: QueuedResourceStatus, error: CloudTPUError, scene: Scene
) -> QueuedResourceStatus:
    """Take another number: the API may answer the same request with the same failed operation."""
    status = book(status, created=False, number=status.bookkeeping.number + 1, asked_at=None)
    status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    return _record_error(status, error, Verb.CREATE, scene)


def _is_answer(outcome: Outcome) -> bool:
    """Return False where the request may still be carried out."""
    return outcome.error is None or outcome.error.kind is not ErrorKind.TRANSIENT


def _is_settled(operation: CloudOperation, sight: Sight) -> bool:
    """Return True where the resource itself tells that the operation is over, whether it can be read or not."""
    if operation.verb == Verb.DELETE:
        return sight.presence is Presence.ABSENT
    return sight.is_ours and sight.resource is not None and sight.resource.state != "CREATING"


def _is_still_there(sight: Sight) -> bool:
    return sight.is_ours and sight.resource is not None and sight.resource.state != "DELETING"


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
    return book(status.model_copy(update={"error": None}), retries=0, not_before=None)

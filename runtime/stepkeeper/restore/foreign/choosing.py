"""Choose the step of another writer that a training goes on from if nothing is committed: the newest complete one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import ForeignBase
from stepkeeper.log.foreign_steps import METADATA, ForeignStep, find_steps_in, find_unnamed_in, root_of
from stepkeeper.loggers import logger
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.storage import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["choose_foreign_step", "find_fault"]

_log: Final = logger(__name__)
_NAMED: Final = 8

Look = Callable[[ForeignStep], str | None]
"""Tells why a training can't go on from a step; None if it can."""


def choose_foreign_step(
    store: Store, reopen: Callable[[], Store], *, patience: Patience = DEFAULT_PATIENCE
) -> ForeignBase | None:
    """Choose the newest complete step of another writer; None if there is no step at all, complete or not.

    Newer steps that are not complete are logged as errors and named in the answer.

    Raises:
        RestoreError: There are checkpoints, and a training can go on from none of them.
        StorageError: The store gave no answer, or refused.

    """
    listed = patience.retry(lambda: store.list(""))
    steps = find_steps_in(listed)
    if not steps:
        _refuse_unnamed(store, find_unnamed_in(listed))
        return None
    return choose_newest(store, steps, lambda step: find_fault(store, step, reopen, patience=patience))


def choose_newest(
    store: Store, steps: Sequence[ForeignStep], look: Look, reason: str | None = None
) -> ForeignBase:
    """Choose the first of `steps` that `look` finds nothing wrong with. Raises RestoreError if there is none."""
    wrong = [] if reason is None else [reason]
    for step in steps:
        why = look(step)
        if why is None:
            return replace(step.base, reason="; ".join(wrong) or None)
        wrong.append(f"step {step.step} ({step.folder}): {why}")
        _log.error(
            "%s: step %d of another writer is not gone on from: %s",
            store.uri,
            step.step,
            why,
            extra={"step": step.step},
        )
    said = "; ".join(wrong[:_NAMED]) + ("; …" if len(wrong) > _NAMED else "")
    raise RestoreError(
        f"{store.uri} holds checkpoints of another writer, and none of them is whole: {said}. Put back what "
        "is missing; or, for the training to start from scratch, give it another root"
    )


def find_fault(
    store: Store, step: ForeignStep, reopen: Callable[[], Store], *, patience: Patience = DEFAULT_PATIENCE
) -> str | None:
    """Find what `step` lacks by its names, sizes and `.metadata`; None if nothing.

    Bad bytes are read a second time.
    """
    if not step.is_finished:
        return f"it has no {METADATA}: its save didn't come to the end"
    try:
        content = open_content(store, step.folder, patience=patience)
    except TornCheckpointError:
        fresh = reopen()
        try:
            content = open_content(fresh, step.folder, patience=patience)
        except TornCheckpointError as error:
            return str(error)
        finally:
            fresh.close()
    return content.find_lacking(step.objects)


def _refuse_unnamed(store: Store, folders: Sequence[str]) -> None:
    if "" in folders:
        raise RestoreError(
            f"{store.uri} is a checkpoint itself: give the folder above, in which it has the name of its step"
        )
    roots = sorted({root for root in map(root_of, folders) if root is not None})
    if roots:
        raise RestoreError(
            f"{store.uri} holds no steps, but {_some(roots)} in it {'does' if len(roots) == 1 else 'do'}: give that "
            "as the root; or, for the training to start from scratch, give it another one"
        )
    if folders:
        raise RestoreError(
            f"{store.uri} holds checkpoints whose names tell no step: {_some(folders)}. Rename them "
            "(step-100, right in the root), or give another root"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")

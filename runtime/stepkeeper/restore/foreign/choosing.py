"""Choose the step of another writer that a training resumes from if nothing is committed: the newest complete one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import ForeignBase
from stepkeeper.log.foreign_steps import METADATA, ForeignStep, find_steps_in, find_unnamed_in
from stepkeeper.loggers import logger
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.storage import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["choose_foreign_step", "find_fault"]

_log: Final = logger(__name__)
_NAMED: Final = 8

Look = Callable[[ForeignStep], str | None]
"""Returns why a training can't resume from a step; None if it can."""


def choose_foreign_step(
    store: Store, reopen: Callable[[], Store], *, patience: Patience = DEFAULT_PATIENCE
) -> ForeignBase | None:
    """Choose the newest complete step of another writer; None if there is no step at all, complete or not.

    Newer steps that are not complete are logged as errors and named in the answer. Raises RestoreError if
    training can resume from none of the checkpoints, and StorageError.
    """
    listed = patience.retry(lambda: store.list(""))
    steps = find_steps_in(listed)
    if not steps:
        if unnamed := find_unnamed_in(listed):
            named = ", ".join(name or "the root itself" for name in unnamed[:_NAMED])
            raise RestoreError(
                f"{store.uri} holds checkpoints that aren't steps of it: {named}{', …' if unnamed[_NAMED:] else ''}. "
                "Use the folder in which each has the name of its step (step-100); or, to start the training from "
                "scratch, another root"
            )
        return None
    return choose_newest(store, steps, lambda step: find_fault(store, step, reopen, patience=patience))


def choose_newest(
    store: Store, steps: Sequence[ForeignStep], look: Look, reason: str | None = None
) -> ForeignBase:
    """Choose the first of `steps` that `look` finds nothing wrong with. Raises RestoreError if there is none.

    `reason` is the fault of a newer step that was chosen before, if one was.
    """
    wrong = [] if reason is None else [reason]
    for step in steps:
        why = look(step)
        if why is None:
            return replace(step.base, reason="; ".join(wrong) or None)
        wrong.append(f"step {step.step} ({step.folder}): {why}")
        text = "%s: not resuming from step %d of another writer: %s"
        _log.error(text, store.uri, step.step, why, extra={"step": step.step})
    listed = "; ".join(wrong[:_NAMED]) + ("; …" if len(wrong) > _NAMED else "")
    raise RestoreError(
        f"{store.uri} holds checkpoints of another writer, and none of them is complete: {listed}. Restore what is "
        "missing; or, to start the training from scratch, use another root"
    )


def find_fault(
    store: Store, step: ForeignStep, reopen: Callable[[], Store], *, patience: Patience = DEFAULT_PATIENCE
) -> str | None:
    """Find missing parts of `step` by its names, sizes and `.metadata`, if any. Bad bytes are read twice."""
    if not step.is_finished:
        return f"it has no {METADATA}: its save didn't finish"
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

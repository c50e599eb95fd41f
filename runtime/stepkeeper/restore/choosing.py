"""Which commit is restored, and whether it was: the ranks agree on both."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stepkeeper.checkpoint import read_manifests
from stepkeeper.companion.client import error_from, error_to
from stepkeeper.companion.messages import Begun, Kind, Quarantine, Restored
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.dcp.metadata import merge_tensors, merge_values
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.fitting import error_said, first_error, raised_from
from stepkeeper.gang import Gang
from stepkeeper.log import CommitRecord, Log
from stepkeeper.restore.loading import Loading, agreed_mismatch
from stepkeeper.results import CheckpointInfo, RestoreResult, TensorInfo
from stepkeeper.storage import Store

__all__ = ["Restorer"]

_log: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 3600.0


class Restorer:
    """Restores for one rank, together with the others."""

    def __init__(self, store: Store, companion: Companion, gang: Gang) -> None:
        self._store = store
        self._companion = companion
        self._gang = gang
        self._number = 0

    def latest(self, state: Mapping[str, object], take_over: str | None = None) -> CommitRecord | None:
        """`state` is what HEAD's commit holds, or its parent's if HEAD's was torn; None if the root holds none.

        Raises:
            FencedError: the root is another's.
            RestoreError: a commit was meant to be found and can't be used.
            LoadMismatchError: the state asks for other things than the commit holds.

        """
        base = self._agree(partial(self._companion.latest, take_over=take_over))
        condemned: CommitRecord | None = None
        while base is not None:
            torn = self._load(base, state)
            if torn is None:
                self._agree(partial(self._note_restored, base))
                return base
            if condemned is not None:
                raise RestoreError(
                    f"two commits were read bad in one start: step {condemned.step} and step {base.step} ({torn}). "
                    "More likely this node or its way to the store is broken than both of them; nothing more was "
                    "condemned"
                )
            condemned = base
            _log.error("the commit of step %d is torn, its parent is loaded instead: %s", base.step, torn)
            base = self._agree(partial(self._quarantine, base, torn))
        if condemned is not None:
            raise RestoreError(
                f"the commit of step {condemned.step} was read bad, and there is none before it"
            )
        return None

    def step(self, step: int, state: Mapping[str, object]) -> CommitRecord:
        """`state` is what the newest commit of `step` on HEAD's line holds. Nothing is appended to the log.

        Raises:
            RestoreError: there is no such commit.
            TornCheckpointError: bytes of it are bad.

        """
        record = self._agree(partial(self.find, step))
        assert record is not None
        torn = self._load(record, state)
        if torn is not None:
            raise TornCheckpointError(torn)
        return record

    def find(self, step: int) -> CommitRecord:
        """The newest commit of `step` on HEAD's line. Raises RestoreError, listing the steps that there are."""
        line = Log(self._store).open().line
        record = next((record for record in line if record.step == step), None)
        if record is None:
            steps = ", ".join(str(record.step) for record in reversed(line)) or "none"
            raise RestoreError(f"{self._store.uri} has no commit of step {step}; its steps: {steps}")
        return record

    def steps(self) -> list[int]:
        """The steps of HEAD's line."""
        return sorted({record.step for record in Log(self._store).open().line})

    def describe(self, step: int) -> CheckpointInfo:
        """What the commit of `step` holds, from its manifests. Raises RestoreError, TornCheckpointError."""
        record = self.find(step)
        manifests = read_manifests(self._store, record)
        return CheckpointInfo(
            sequence=record.slot,
            step=record.step,
            uri=self._uri(record),
            size_bytes=record.size_bytes,
            tensors={
                fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape)
                for fqn, tensor in merge_tensors(manifests).items()
            },
            values=tuple(merge_values(manifests)),
        )

    def result(self, record: CommitRecord) -> RestoreResult:
        """What a caller is told of a restored commit."""
        return RestoreResult(sequence=record.slot, step=record.step, uri=self._uri(record))

    def _uri(self, record: CommitRecord) -> str:
        return f"{self._store.uri.rstrip('/')}/{record.folder}"

    def _load(self, record: CommitRecord, state: Mapping[str, object]) -> str | None:
        """None if all ranks have loaded it, else why bytes of it are bad. Whatever else goes wrong is raised.

        No rank changes anything of its state before all have said that theirs fits.

        """
        name = self._name()
        loading = Loading(self._store, record, state, self._gang.ranks)
        torn = self._together(
            f"{name}/fit", loading.compare, partial(agreed_mismatch, loading, self._uri(record))
        )
        if torn is None:
            torn = self._together(f"{name}/filled", loading.fill)
        # Objects get nothing of a commit before all ranks have all of it.
        return self._together(f"{name}/given", loading.give) if torn is None else torn

    def _together(
        self,
        name: str,
        act: Callable[[], dict[str, Any]],
        judge: Callable[[Sequence[dict[str, Any]]], Exception | None] = lambda _: None,
    ) -> str | None:
        """All ranks have acted, and none failed; else why bytes are bad.

        What the ranks say of it is for rank 0 to judge: the error is raised in all of them.

        """
        failure: Exception | None = None
        try:
            said = act()
        except TornCheckpointError as error:
            said = {"torn": str(error)}
        except Exception as error:  # raised below, once the others have been told
            failure = error
            said = {"error": error_said(error, self._gang.rank)}
        by_rank = self._gang.gather(name, said, _TIMEOUT_S)
        worst = first_error(by_rank)
        if by_rank and worst is None and (judged := judge(by_rank)) is not None:
            worst = error_said(judged, self._gang.rank)
        torn = next((each["torn"] for each in by_rank if "torn" in each), None)
        # An error comes first: what is no fault of the commit's condemns none.
        answer = {"error": worst} if worst is not None else {} if torn is None else {"torn": torn}
        answer = self._gang.broadcast(f"{name}/worst", answer, _TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise raised_from(answer["error"])
        return None if "torn" not in answer else str(answer["torn"])

    def _quarantine(self, commit: CommitRecord, reason: str) -> CommitRecord | None:
        body = Quarantine(commit=commit.slot, reason=reason)
        return decode(Begun, self._companion.process().ask(Kind.QUARANTINE, encode(body))).base

    def _note_restored(self, commit: CommitRecord) -> CommitRecord | None:
        self._companion.process().ask(Kind.RESTORED, encode(Restored(commit=commit.slot)))
        return commit

    def _agree(self, choose: Callable[[], CommitRecord | None]) -> CommitRecord | None:
        """What rank 0 chooses, after all ranks have met: it writes nothing before they are all there."""
        name = self._name()
        self._gang.gather(f"{name}/met", {}, _TIMEOUT_S)
        choice: dict[str, Any] | None = None
        failure: Exception | None = None
        if self._gang.rank == 0:
            try:
                commit = choose()
                choice = {} if commit is None else {"commit": encode(commit)}
            except Exception as error:  # raised below, once the others have been told
                failure = error
                choice = {"error": error_to(error)}
        choice = self._gang.broadcast(f"{name}/choice", choice, _TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in choice:
            raise error_from(choice["error"])
        return decode(CommitRecord, choice["commit"]) if "commit" in choice else None

    def _name(self) -> str:
        self._number += 1
        return f"restore/{self._number}"

"""Carry out the trainer's requests in the companion process. In a training, only this code writes to the root."""

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from stepkeeper.checkpoint.finishing import FinishedCheckpoint, finish_checkpoint
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.companion.background import BackgroundTask
from stepkeeper.companion.messages import (
    ClaimedRoot,
    ClaimRequest,
    CommitRequest,
    Committed,
    OpenRequest,
    QuarantineRequest,
    VerifiedNotice,
    VoidRequest,
)
from stepkeeper.companion.reporter import LogView, Reporter
from stepkeeper.companion.shares import ShareWriter
from stepkeeper.companion.upkeep import CommitUpkeep
from stepkeeper.contract import Directive, Head, ReportedCommit
from stepkeeper.errors import CompanionError, ForeignStepsError, UnknownOutcomeError
from stepkeeper.log import Claim, CommitRecord, ForeignBase, Log
from stepkeeper.log.foreign_steps import find_steps_in, find_unnamed_in
from stepkeeper.log.store_times import StoreTimes, read_restart_history
from stepkeeper.storage import Store, open_store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["Session"]

_SETTLE_EVERY_S: Final = 1.0


class Session:
    """Serve one root for one rank. The log's thread calls all methods except the constructor."""

    def __init__(
        self,
        opening: OpenRequest,
        on_directive: Callable[[Directive], None],
        *,
        on_complaint: Callable[[str | None], None] = lambda _text: None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._opening = opening
        self._patience = patience
        self._store: Store = open_store(opening.uri, unsafe_single_writer=opening.unsafe_single_writer)
        self._log = Log(self._store, patience=patience)
        self._times = StoreTimes(self._store, patience=patience)
        self._claim = opening.claim
        self.shares = ShareWriter(opening, self._store, patience=patience)
        self._upkeep = CommitUpkeep(
            self._log,
            self._store,
            self._times,
            opening.keep,
            self._require_claim,
            on_complaint=on_complaint,
            on_end=self._update_reporter,
            patience=patience,
        )
        self.reporter: Reporter | None = None
        if opening.report_target is not None and opening.rank == 0:
            self.reporter = Reporter(opening.report_target, opening.report_interval_s, on_directive)

    def resume_claim(self) -> None:
        """Prove that the opening's claim, if any, is still the newest. Raises FencedError."""
        if self._claim is not None and self._opening.rank == 0:
            self._log.resume(self._claim)
            self._update_reporter()

    def claim_root(self, body: ClaimRequest) -> ClaimedRoot:
        """Claim the root."""
        self._claim = self._log.begin(
            self._opening.identity,
            base=body.base if body.legacy is None else body.legacy,
            offer=partial(self._read_offer, body),
            after=body.after,
            nonce=body.nonce,
            branch=body.branch,
            take_over=body.take_over_any or body.take_over,
            host=socket.gethostname(),
        )
        self._update_reporter()
        claimed = self._describe_claim()
        if not body.asks_past:
            return claimed
        return replace(claimed, past=read_restart_history(self._log.entry, self._times, self._claim.slot))

    def _read_offer(self, body: ClaimRequest) -> ForeignBase | None:
        """Return the other writer's step that the trainer chose to continue from, if any.

        Raises ForeignStepsError if the root has such steps, and the trainer chose none.
        """
        if body.offer is None:
            listed = self._patience.retry(lambda: self._store.list(""))
            if find_steps_in(listed) or find_unnamed_in(listed):
                raise ForeignStepsError(
                    f"{self._store.uri}: the root has no commit, but checkpoints of another writer: "
                    "choose one of them first"
                )
        return body.offer

    def refresh_head(self) -> ClaimedRoot:
        """Prove that the claim is still the newest. The answer's base is the current HEAD."""
        self._log.latest(self._require_claim())
        return self._describe_claim()

    def quarantine_commit(self, body: QuarantineRequest) -> ClaimedRoot:
        """Quarantine the commit, so that it is no longer live. The answer's base is the new HEAD."""
        self._log.quarantine(self._require_claim(), body.commit, body.reason)
        self._update_reporter()
        return self._describe_claim()

    def mark_verified(self, body: VerifiedNotice) -> None:
        """Note in the log that all ranks have read the commit whole."""
        self._log.mark_restored(self._require_claim(), body.commit)
        self._update_reporter()

    def commit_save(self, body: CommitRequest) -> tuple[Committed, BackgroundTask]:
        """Make the checkpoint HEAD. Return the answer, and the upkeep task to start after it is sent.

        The task runs in the log's thread too, but for its blocking calls. These use only the store, so requests may be
        answered meanwhile. Tasks have to run one after another, in the order of their commits.
        """
        order, own = self.shares.take_written(body.folder)
        finished = finish_checkpoint(
            self._store,
            own,
            body.others,
            structure=order.structure,
            cache=self.shares.layout_cache,
            patience=self._patience,
        )
        record = self._append_commit(own, finished, body.metrics)
        uri = self._folder_uri(record.folder)
        self._update_reporter(
            ReportedCommit(
                sequence=record.slot,
                step=record.step,
                uri=uri,
                size_bytes=record.size_bytes,
                duration_millis=body.duration_millis,
                time_unix_s=int(time.time()),
            )
        )
        return Committed(record=record, uri=uri), self._upkeep.work_after_commit(record, finished)

    def void_save(self, body: VoidRequest) -> None:
        """Give up the save in that folder for good."""
        self._log.void(self._require_claim(), body.reason, body.folder)
        self.shares.forget_share(body.folder)
        self._update_reporter()

    def await_last_report(self, timeout_s: float) -> None:
        """Wait until the last report is answered, at most `timeout_s` seconds."""
        if self.reporter is not None and not self.reporter.await_answer(timeout_s):
            print("stepkeeper: the last report got no answer in time", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log

    def _append_commit(
        self, own: Manifest, finished: FinishedCheckpoint, metrics: dict[str, str] | None
    ) -> CommitRecord:
        """Append the commit's entry to the log, and retry until the store has answered."""
        claim = self._require_claim()
        # An append is open while it isn't known whether its entry was put. An open one isn't this commit's.
        self._settle_log()
        try:
            return self._log.commit(
                claim,
                step=own.step,
                folder=own.folder,
                size_bytes=finished.size_bytes,
                manifest=finished.manifest,
                metrics=metrics,
            )
        except UnknownOutcomeError:
            record = self._settle_log()
            assert record is not None
            return record

    def _settle_log(self) -> CommitRecord | None:
        """Find out how all open appends ended. Return the open commit, if there was one."""
        while True:
            try:
                return self._log.settle()
            except UnknownOutcomeError:
                self._patience.sleep(_SETTLE_EVERY_S)

    def make_room(self) -> BackgroundTask | None:
        """Return a task that deletes all deletable data, without a commit; None if this process may delete nothing."""
        return None if self._claim is None or self._opening.rank != 0 else self._upkeep.make_room()

    def _require_claim(self) -> Claim:
        if self._claim is None:
            raise CompanionError("the root was not claimed: no claim to write under")
        return self._claim

    def _describe_claim(self) -> ClaimedRoot:
        state = self._log.state
        assert state.root is not None
        return ClaimedRoot(
            claim=self._require_claim(),
            root=state.root,
            tail=state.tail,
            base=state.latest,
            legacy=state.legacy,
            branching=state.branching,
        )

    def _folder_uri(self, folder: str) -> str:
        return f"{self._store.uri.rstrip('/')}/{folder}"

    def _update_reporter(self, commit: ReportedCommit | None = None) -> None:
        if self.reporter is None:
            return
        state, head = self._log.state, None
        if (latest := state.latest) is not None:
            uri = self._folder_uri(latest.folder)
            head = Head(sequence=latest.slot, step=latest.step, uri=uri, size_bytes=latest.size_bytes)
        claim = None if self._claim is None else self._claim.slot
        self.reporter.update_log(
            LogView(root=state.root, claim=claim, tail=state.tail, head=head, error=self._upkeep.complaint),
            commit,
        )

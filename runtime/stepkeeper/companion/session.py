"""Carry out the trainer's requests in the companion process. No other code writes to a root."""

import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from stepkeeper.checkpoint import (
    FinishedCheckpoint,
    SaveOrder,
    Structure,
    StructureCache,
    finish_checkpoint,
    verify_objects,
    write_checkpoint,
)
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.companion.background import BackgroundTask, run_in_thread
from stepkeeper.companion.messages import (
    ClaimedRoot,
    ClaimRequest,
    CommitRequest,
    Committed,
    OpenRequest,
    QuarantineRequest,
    Staged,
    UploadRequest,
    VerifiedNotice,
    VoidRequest,
    WriteRequest,
    Written,
)
from stepkeeper.companion.reporter import LogView, Reporter
from stepkeeper.contract import Directive, Head, ReportedCommit
from stepkeeper.errors import (
    CompanionError,
    ForeignStepsError,
    StepkeeperError,
    UnknownOutcomeError,
    VerifyError,
)
from stepkeeper.log import Claim, CommitRecord, ForeignBase, Log
from stepkeeper.log.foreign_steps import find_steps_in, find_unnamed_in
from stepkeeper.log.restarts import read_restart_history
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.retention.deletable import deletable
from stepkeeper.retention.garbage import Garbage, collect, sweep
from stepkeeper.storage import Store, open_store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper.tier import LocalStaging, LocalTier

__all__ = ["Session"]

_SETTLE_EVERY_S: Final = 1.0


@contextmanager
def _map_region(fd: int) -> Iterator[memoryview]:
    """Map the memory behind `fd`, as long as anything refers to it."""
    size_bytes = os.fstat(fd).st_size
    yield memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) if size_bytes else b"")


class Session:
    """Serve one root for one rank. One thread calls all methods but the constructor: the log's."""

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
        self._staging: LocalStaging | None = None
        if opening.tier is not None:
            self._staging = LocalStaging(
                self._store, LocalTier(opening.tier, self._store.uri), patience=patience
            )
        self._staging_fails = False
        self._structures = StructureCache()
        self._staged: dict[str, tuple[SaveOrder, Manifest]] = {}
        self._written: dict[str, tuple[SaveOrder, Manifest]] = {}
        self._verified: set[int] = set()
        self._folders: dict[int, str] = {}
        """Folders by slot, of commits whose data exists as far as this process knows, also after their deletion in
        the log.
        """

        self._collected = False
        self._complaint: str | None = None
        self._on_complaint = on_complaint
        self.reporter: Reporter | None = None
        if opening.report_target is not None and opening.rank == 0:
            self.reporter = Reporter(opening.report_target, opening.report_interval_s, on_directive)

    def resume_claim(self) -> None:
        """Prove that the claim that came with the opening, if any, still holds. Raises FencedError."""
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
            take_over=body.take_over_any or body.take_over,
            host=socket.gethostname(),
        )
        self._update_reporter()
        claimed = self._describe_claim()
        if not body.asks_past:
            return claimed
        return replace(claimed, past=read_restart_history(self._log.entry, self._times, self._claim.slot))

    def _read_offer(self, body: ClaimRequest) -> ForeignBase | None:
        """Return the trainer's choice among another writer's steps; None if there are none.

        Raises:
            ForeignStepsError: There are such steps, and the trainer hasn't chosen one.

        """
        if body.offer is None:
            listed = self._patience.retry(lambda: self._store.list(""))
            if find_steps_in(listed) or find_unnamed_in(listed):
                raise ForeignStepsError(
                    f"{self._store.uri}: nothing is committed here, and there are checkpoints of another writer: "
                    "one of them is to be chosen first"
                )
        return body.offer

    def refresh_head(self) -> ClaimedRoot:
        """Prove that the claim still holds. The answer's base is HEAD at this moment."""
        self._log.latest(self._require_claim())
        return self._describe_claim()

    def quarantine_commit(self, body: QuarantineRequest) -> ClaimedRoot:
        """Quarantine the commit, so that it isn't live any more. The answer's base is the new HEAD."""
        self._log.quarantine(self._require_claim(), body.commit, body.reason)
        self._update_reporter()
        return self._describe_claim()

    def mark_verified(self, body: VerifiedNotice) -> None:
        """Note in the log that all ranks have read the commit whole."""
        self._log.mark_restored(self._require_claim(), body.commit)
        self._update_reporter()

    def write_share(self, body: WriteRequest, region_fd: int) -> Written:
        """Write this rank's share durably. Rank 0's manifest is written with the commit."""
        order = self._complete_order(body)
        with _map_region(region_fd) as data:
            manifest = write_checkpoint(
                self._store, order, data, cache=self._structures, patience=self._patience
            )
        self._written = {manifest.folder: (order, manifest)}
        return Written(size_bytes=manifest.size_bytes, manifest=manifest.make_ref())

    def stage_share(self, body: WriteRequest, region_fd: int) -> Staged:
        """Write this rank's share to the local disk, for `upload_share` to go on from there. A failure leaves nothing
        there.
        """
        self._staged = {}
        if self._staging is None:
            raise CompanionError("there is no local tier to stage anything in")
        order = self._complete_order(body)
        try:
            with _map_region(region_fd) as data:
                manifest = self._staging.stage(order, data, cache=self._structures)
        except OSError as error:
            why_not = None if self._staging_fails else str(error)
            self._staging_fails = True
            return Staged(held=False, why_not=why_not)
        self._staging_fails = False
        self._staged = {manifest.folder: (order, manifest)}
        return Staged(held=True)

    def upload_share(self, body: UploadRequest) -> Written:
        """Upload the staged share, with the result of `write_share`.

        Raises:
            SaveError: The local disk doesn't hold the share any more.

        """
        if self._staging is None or body.folder not in self._staged:
            raise CompanionError(f"nothing was staged for {body.folder} by this companion process")
        order, manifest = self._staged[body.folder]
        self._staging.upload(manifest)
        self._staged = {}
        self._written = {manifest.folder: (order, manifest)}
        return Written(size_bytes=manifest.size_bytes, manifest=manifest.make_ref())

    def commit_save(self, body: CommitRequest) -> tuple[Committed, BackgroundTask]:
        """Make the checkpoint HEAD.

        Returns:
            The answer, and the work to do after it is sent. That work also runs in the log's thread, except for its
            blocking
            calls, which use only the store: requests may be answered meanwhile. The work after several commits has
            to be done
            in their order, one after the other.

        """
        if body.folder not in self._written:
            raise CompanionError(f"nothing was written to {body.folder} by this companion process")
        order, own = self._written.pop(body.folder)
        finished = finish_checkpoint(
            self._store,
            own,
            body.others,
            structure=order.structure,
            cache=self._structures,
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
        return Committed(record=record, uri=uri), self._work_after_commit(record, finished)

    def void_save(self, body: VoidRequest) -> None:
        """Give up the save in that folder for good."""
        self._log.void(self._require_claim(), body.reason, body.folder)
        self._written.pop(body.folder, None)
        self._staged.pop(body.folder, None)
        self._update_reporter()

    def await_last_report(self, timeout_s: float) -> None:
        """Wait until the last report is answered, at most `timeout_s` seconds."""
        if self.reporter is not None and not self.reporter.await_answer(timeout_s):
            print("stepkeeper: the last report got no answer in time", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log

    def _complete_order(self, body: WriteRequest) -> SaveOrder:
        """Complete the request's order with the structure that this process holds.

        Raises:
            CompanionError: This process doesn't hold it.

        """
        if body.structure is not None:
            self._structures.hold_structure(Structure.from_text(body.structure))
        structure = self._structures.find_structure(body.structure_key)
        if structure is None:
            raise CompanionError(
                f"{body.folder} is to be written by a structure that wasn't told: nothing was"
            )
        return body.order(structure, rank=self._opening.rank, world_size=self._opening.world_size)

    def _append_commit(
        self, own: Manifest, finished: FinishedCheckpoint, metrics: dict[str, str] | None
    ) -> CommitRecord:
        """Append the commit's entry to the log, however long the store takes to answer."""
        claim = self._require_claim()
        # An append that is still open, of a deletion say, must not be taken for this commit's.
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
        """Find out how all open appends ended. Return the commit that was open, if one was."""
        while True:
            try:
                return self._log.settle()
            except UnknownOutcomeError:
                self._patience.sleep(_SETTLE_EVERY_S)

    def _work_after_commit(self, record: CommitRecord, finished: FinishedCheckpoint) -> BackgroundTask:
        """Verify the commit, then delete what may go. A failure is reported, and the next commit's work tries
        again.
        """
        try:
            yield from self._verify_commit(record, finished)
            yield from self._delete_unkept()
            if not self._collected:
                yield from self._collect_leftovers()
            self._set_complaint(None)
        except Exception as error:  # the commit stands, and the next save needs this process
            self._report_failure(f"after the commit of step {record.step}", error)
        self._update_reporter()

    def make_room(self) -> BackgroundTask | None:
        """Return the task that deletes all that may go, without a commit before it; None if this process may delete
        nothing.
        """
        return None if self._claim is None or self._opening.rank != 0 else self._make_room()

    def _make_room(self) -> BackgroundTask:
        try:
            yield from self._delete_unkept()
            yield from self._collect_leftovers()
        except Exception as error:  # the save fails for lack of room, and its error says so
            self._report_failure("room could not be made", error)

    def _report_failure(self, what: str, error: Exception) -> None:
        self._set_complaint(f"{what}: {error!r}")
        if not isinstance(error, StepkeeperError):
            traceback.print_exception(error)

    def _set_complaint(self, text: str | None) -> None:
        """Report a failure of the work after a commit; None once that work went well again."""
        if text != self._complaint:
            self._on_complaint(text)
        self._complaint = text

    def _verify_commit(self, record: CommitRecord, finished: FinishedCheckpoint) -> BackgroundTask:
        """Check that the store holds the written objects.

        Raises:
            VerifyError: It doesn't.
            FencedError: It doesn't, and a later claim may have deleted them.

        """
        if record.slot not in self._log.state.commits:
            # A later commit was made before this one's turn came, and retention has deleted this one already.
            return
        try:
            yield from run_in_thread(partial(verify_objects, self._store, finished, patience=self._patience))
        except VerifyError:
            self._log.resume(self._require_claim())
            raise
        self._verified.add(record.slot)

    def _delete_unkept(self) -> BackgroundTask:
        """Delete the commits that retention doesn't keep: first in the log, then the data that no pin protects.

        This also deletes the data of earlier deletions that were cut short, or whose pins are gone by now.
        """
        keep = self._opening.keep
        times_unix_s: Mapping[int, float] = {}
        if keep is not None and keep.needs_times:
            times_unix_s = yield from run_in_thread(partial(self._times.of_commits, self._log.state.line))
        # Only now: commits that were made during the blocking call may be deleted too.
        self._folders |= {slot: record.folder for slot, record in self._log.state.commits.items()}
        if keep is not None:
            policy = keep.policy
            self._log.delete(
                self._require_claim(), lambda state: deletable(state, policy, self._verified, times_unix_s)
            )
        commits = self._log.state.commits
        deleted = [Garbage(folder=f, slot=slot) for slot, f in self._folders.items() if slot not in commits]
        # Whatever is committed meanwhile, these stay deleted, and a later pin finds that it is too late.
        left = yield from run_in_thread(partial(sweep, self._store, deleted, patience=self._patience))
        for slot in {each.slot for each in deleted} - {each.slot for each in left}:
            assert slot is not None
            del self._folders[slot]

    def _collect_leftovers(self) -> BackgroundTask:
        """Delete what earlier claims left behind. Pinned data stays, and goes once it isn't pinned any more."""
        state = self._log.refresh()
        report = yield from run_in_thread(
            partial(collect, state, self._log.entry, self._store, patience=self._patience)
        )
        self._folders |= {each.slot: each.folder for each in report.pinned if each.slot is not None}
        self._collected = True

    def _require_claim(self) -> Claim:
        if self._claim is None:
            raise CompanionError("nothing was claimed: there is no claim to write under")
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
        )

    def _folder_uri(self, folder: str) -> str:
        return f"{self._store.uri.rstrip('/')}/{folder}"

    def _update_reporter(self, commit: ReportedCommit | None = None) -> None:
        if self.reporter is None:
            return
        state = self._log.state
        latest = state.latest
        head = None
        if latest is not None:
            head = Head(
                sequence=latest.slot,
                step=latest.step,
                uri=self._folder_uri(latest.folder),
                size_bytes=latest.size_bytes,
            )
        claim = None if self._claim is None else self._claim.slot
        self.reporter.update_log(
            LogView(root=state.root, claim=claim, tail=state.tail, head=head, error=self._complaint), commit
        )

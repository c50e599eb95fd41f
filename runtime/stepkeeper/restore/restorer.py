"""Which commit is restored, and whether it was: the ranks agree on both."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stepkeeper.checkpoint import read_manifests
from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.companion.messages import Begun, Kind, Quarantine, Restored
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import Gang
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import CommitRecord, LegacyBase, Log
from stepkeeper.log.foreign_steps import LegacyRecord, LegacyStep, Restorable, below, find_steps
from stepkeeper.loggers import logger
from stepkeeper.restore.foreign.choosing import choose, incomplete, newest
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.restore.foreign.loading import LegacyLoading
from stepkeeper.restore.loading import Loading, agreed_mismatch
from stepkeeper.restore.peers.exchange import Exchange, exchange_among
from stepkeeper.restore.results import CheckpointInfo, RestoreResult, TensorInfo
from stepkeeper.restore.second_read import Host, confirm, this_host
from stepkeeper.restore.verifying import Verification, Verifying
from stepkeeper.restore.votes import Agreement
from stepkeeper.storage import Store, open_store
from stepkeeper.tier import NearStore
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.saving.known_plan import WrittenShare

__all__ = ["Restorer"]

_log: Final = logger(__name__)
_WHOLE: Final = LoadRules()


class Restorer:
    """Restores for one rank, together with the others."""

    def __init__(
        self,
        store: Store,
        companion: Companion,
        gang: Gang,
        *,
        host: Host | None = None,
        reopen: Callable[[], Store] | None = None,
        near: NearStore | None = None,
    ) -> None:
        """`reopen` opens the same root over a connection of its own; `near` is it with copies on a local disk."""
        self._store = store
        self._near = near
        self._read_near = False
        """In rank 0: whether any rank had something of the present load from its local disk."""

        self._companion = companion
        self._gang = gang
        self._host = host or this_host()
        self._reopen = reopen or partial(open_store, store.uri)
        self._agreement = Agreement(gang)
        self._condemned: str | None = None
        """The one that this process has taken part in condemning, and why: there is no second one."""

        self._written: WrittenShare | None = None
        self._half_filled: frozenset[str] = frozenset()
        """Tensors of the present state that hold parts of a torn checkpoint."""

        companion.choose_legacy = partial(choose, store, self._reopen)

    def latest(
        self,
        state: Mapping[str, object],
        *,
        take_over: str | None = None,
        rules: LoadRules = _WHOLE,
    ) -> Restorable | None:
        """`state` is what HEAD's commit holds, or its parent's if HEAD's was torn; None if the root holds none.

        Where nothing is committed that is the newest complete step of another writer, if there are such.

        Raises:
            FencedError: the root is another's.
            RestoreError: a commit was meant to be found and can't be used.
            BadNodeError: one node reads bad bytes where another one reads good ones.
            LoadMismatchError: the state asks for other things than the commit holds.

        """
        self._half_filled = frozenset()
        base = self._agreement.on(partial(self._head, take_over))
        while base is not None:
            torn = self._load(base, state, rules)
            if torn is None:
                if rules.strict and rules.items is None and not rules.exclude:
                    # It counts as verified: all of it was read.
                    self._agreement.on(partial(self._note_restored, base))
                return base
            if self._condemned is not None:
                raise RestoreError(
                    f"two checkpoints were read bad in one start: {self._condemned}; and {_named(base)}: {torn}. More "
                    "likely a node or its way to the store is broken than both of them; nothing more was condemned"
                )
            self._condemned = f"{_named(base)}: {torn}"
            _log.error(
                "%s is torn, the one before it is loaded instead: %s",
                _named(base),
                torn,
                extra={"step": base.step},
            )
            base = self._agreement.on(partial(self._condemn, base, torn))
        if self._condemned is not None:
            raise RestoreError(f"there is no checkpoint before the one that was read bad, {self._condemned}")
        return None

    def take_written(self) -> WrittenShare | None:
        """What this rank wrote of the commit that it has loaded, told once; None: nothing by a plan of as many."""
        written, self._written = self._written, None
        return written

    def step(self, step: int, state: Mapping[str, object], *, rules: LoadRules = _WHOLE) -> Restorable:
        """`state` is what the newest commit of `step` on HEAD's line holds. Nothing is appended to the log.

        Raises:
            RestoreError: there is no such commit; or it was deleted meanwhile, and parts of it are in `state`.
            TornCheckpointError: bytes of it are bad.
            BadNodeError: one node reads bad bytes where another one reads good ones.

        """
        record = self._agreement.on(partial(self._settled, step))
        assert record is not None
        self.record(record, state, rules=rules)
        return record

    def record(
        self,
        record: Restorable,
        state: Mapping[str, object],
        *,
        rules: LoadRules = _WHOLE,
        pinned: bool = False,
    ) -> None:
        """`state` is what `record`, the same on all ranks, holds. Raises as `step`.

        One that is `pinned` can't be deleted by retention: what is missing of it is damage.
        """
        self._half_filled = frozenset()
        torn = self._load(record, state, rules, partial(self._is_deleted, record, pinned=pinned))
        if torn is not None:
            raise TornCheckpointError(torn)

    def verify(self, step: int) -> Verification:
        """Every byte of the newest commit of `step` on HEAD's line is right, each read by one of the ranks.

        Nothing is appended to the log, nor condemned.

        Raises:
            RestoreError: there is no such commit, or it is another writer's, which has no checksums; or it was deleted
                meanwhile.
            TornCheckpointError: bytes of it are bad.
            BadNodeError: one node reads bad bytes where another one reads good ones.

        """
        record = self._agreement.on(partial(self._settled, step))
        assert record is not None
        if isinstance(record, LegacyRecord):
            raise RestoreError(
                f"{_named(record)} has no checksums of blocks: restore it and save, then it can be verified"
            )
        name, ranks = self._agreement.name(), self._gang.ranks
        with exchange_among(self._gang, name) as exchange:
            verifying = Verifying(self._store, record, ranks.rank, ranks.world_size, exchange)
            torn = self._agreement.together(f"{name}/verified", verifying.read)
            if torn is not None:
                deleted = partial(self._is_deleted, record)
                raise TornCheckpointError(
                    confirm(f"{name}/torn", self._gang, self._host, torn.own, self._reopen, deleted=deleted)
                )
        return Verification(
            sequence=record.slot,
            step=record.step,
            uri=self._uri(record),
            n_objects=verifying.n_objects,
            size_bytes=verifying.size_bytes,
        )

    def find(self, step: int) -> Restorable:
        """The newest commit of `step` on HEAD's line, or what another writer left there of it.

        Raises RestoreError, listing the steps that there are.
        """
        state = Log(self._store).open()
        record = next((record for record in state.line if record.step == step), None)
        if record is not None:
            return record
        found = below(state, self._legacy_steps)
        legacy = next((each for each in found if each.step == step and each.finished), None)
        if legacy is not None:
            return LegacyRecord(slot=state.tail + 1, step=step, folder=legacy.folder)
        there = {record.step for record in state.line} | {each.step for each in found if each.finished}
        steps = ", ".join(map(str, sorted(there))) or "none"
        raise RestoreError(f"{self._store.uri} has no commit of step {step}; its steps: {steps}")

    def _settled(self, step: int) -> Restorable:
        """As `find`, once the deletions that this process's own commits entail have been made."""
        if self._companion.begun is not None:
            # Answered after whatever follows the last commit.
            self._companion.latest()
        return self.find(step)

    def _is_deleted(self, record: Restorable, *, pinned: bool = False) -> bool:
        """The log has had this commit, and a deletion since, which no pin forbade to be carried out."""
        if pinned or isinstance(record, LegacyRecord):
            return False
        state = Log(self._store).open()
        return state.tail >= record.slot and state.commit_in(record.folder) is None

    def steps(self) -> list[int]:
        """The steps of HEAD's line, and of the other writer that it goes on from."""
        state = Log(self._store).open()
        found = below(state, self._legacy_steps)
        return sorted({record.step for record in state.line} | {each.step for each in found if each.finished})

    def describe(self, step: int) -> CheckpointInfo:
        """What the commit of `step` holds, from its manifests. Raises RestoreError, TornCheckpointError."""
        record = self.find(step)
        if isinstance(record, LegacyRecord):
            return self._describe_legacy(record)
        try:
            manifests = read_manifests(self._store, record)
        except TornCheckpointError as error:
            if error.missing and self._is_deleted(record):
                raise RestoreError(f"{_named(record)} was deleted just now: {error}") from error
            raise
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

    def result(self, record: Restorable) -> RestoreResult:
        """What a caller is told of a restored commit."""
        return RestoreResult(sequence=record.slot, step=record.step, uri=self._uri(record))

    def _describe_legacy(self, record: LegacyRecord) -> CheckpointInfo:
        content = open_content(self._store, record.folder)
        objects = self._store.list(f"{record.folder}/")
        return CheckpointInfo(
            sequence=None,
            step=record.step,
            uri=self._uri(record),
            size_bytes=sum(stat.size_bytes for stat in objects),
            tensors={
                fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape)
                for fqn, tensor in content.tensors.items()
            },
            values=content.values,
        )

    def _legacy_steps(self) -> tuple[LegacyStep, ...]:
        return find_steps(self._store)

    def _uri(self, record: Restorable) -> str:
        return f"{self._store.uri.rstrip('/')}/{record.folder}"

    def _load(
        self,
        record: Restorable,
        state: Mapping[str, object],
        rules: LoadRules,
        deleted: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """None if all ranks have loaded it, else why bytes of it are bad. Whatever else goes wrong is raised.

        No rank changes anything of its state before all have said that theirs fits. `deleted` is as `confirm` has it.

        """
        name, together = self._agreement.name(), self._agreement.together
        self._take_near()
        with exchange_among(self._gang, name) as exchange:
            loading = self._loading(record, state, rules, exchange)
            torn = together(f"{name}/fit", loading.compare, partial(agreed_mismatch, loading))
            if torn is None:
                if isinstance(loading, Loading):
                    loading.share(name)
                torn = together(f"{name}/filled", loading.fill)
                if torn is not None:
                    self._half_filled = loading.names
            if torn is None:
                # Objects get nothing of a commit before all ranks have all of it.
                given = together(f"{name}/given", lambda: loading.give() | self._take_near(), self._note_near)
                if given is not None:
                    raise TornCheckpointError(given.said)
                self._written = loading.written if isinstance(loading, Loading) else None
                return None
            # While the ranks are connected: one that is lost meanwhile is missed at once.
            return confirm(f"{name}/torn", self._gang, self._host, torn.own, self._reopen, deleted=deleted)

    def _loading(
        self, record: Restorable, state: Mapping[str, object], rules: LoadRules, exchange: Exchange
    ) -> Loading | LegacyLoading:
        if isinstance(record, LegacyRecord):
            return LegacyLoading(
                self._store,
                record.folder,
                state,
                self._gang.ranks,
                rules=rules,
                half_filled=self._half_filled,
            )
        return Loading(
            self._store if self._near is None else self._near,
            record,
            state,
            self._gang.ranks,
            exchange=exchange,
            rules=rules,
            half_filled=self._half_filled,
        )

    def _take_near(self) -> dict[str, Any]:
        """What this rank has to say of where it read since it was last asked."""
        return {} if self._near is None else {"near_bytes": self._near.take_n_bytes()}

    def _note_near(self, said: Sequence[dict[str, Any]]) -> None:
        self._read_near = any(each.get("near_bytes") for each in said)

    def _head(self, take_over: str | None) -> Restorable | None:
        base = self._companion.latest(take_over=take_over)
        if isinstance(base, LegacyBase):
            _log.warning(
                "nothing is committed in %s: it goes on from another writer's step %d (%s)%s",
                self._store.uri,
                base.step,
                base.folder,
                "" if base.reason is None else f", since {base.reason}",
                extra={"step": base.step},
            )
        return self._restorable(base)

    def _condemn(self, bad: Restorable, reason: str) -> Restorable | None:
        """What HEAD means now that `bad` is known to be bad. Another writer's step has no entry to condemn."""
        if isinstance(bad, CommitRecord):
            body = Quarantine(commit=bad.slot, reason=reason)
            begun = decode(Begun, self._companion.process().ask(Kind.QUARANTINE, encode(body)))
            return self._restorable(begun.base or begun.legacy)
        found = self._legacy_steps()
        older = [each for each in found if each.step <= bad.step and each.folder != bad.folder]
        look = partial(incomplete, self._store, reopen=self._reopen)
        legacy = newest(self._store, older, look, reason=f"{_named(bad)}: {reason}")
        return self._restorable(self._companion.begin_again(legacy).legacy)

    def _note_restored(self, commit: Restorable) -> Restorable:
        # Copies say nothing of what the root holds.
        if isinstance(commit, CommitRecord) and not self._read_near:
            self._companion.process().ask(Kind.RESTORED, encode(Restored(commit=commit.slot)))
        return commit

    def _restorable(self, base: CommitRecord | LegacyBase | None) -> Restorable | None:
        """In rank 0, which has claimed the root."""
        if not isinstance(base, LegacyBase):
            return base
        begun = self._companion.begun
        assert begun is not None
        return LegacyRecord(slot=begun.claim.slot, step=base.step, folder=base.folder)


def _named(record: Restorable) -> str:
    if isinstance(record, LegacyRecord):
        return f"step {record.step} of another writer ({record.folder})"
    return f"the commit of step {record.step} ({record.folder})"

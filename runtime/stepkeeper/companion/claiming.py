"""Claim the root for a trainer through its companion processes. A claim stays if its companion process is replaced.

A claim is an entry of the log: only its process writes from there on. It continues from HEAD, the commit that "latest"
means, unless its process has restored something else, its origin. Then the origin is the claim's base, and becomes
HEAD. A process makes a next claim to continue from another origin, or to begin a branch, which continues nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import ClaimedRoot, ClaimRequest, Kind
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import (
    FencedError,
    ForeignStepsError,
    RestoreError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import CommitRecord, ForeignBase
from stepkeeper.log.claims import Claim, must_branch
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.time_limits import CLAIM_S

__all__ = ["Origin", "RootClaims"]

_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The commit, or another writer's step, that a state was restored from. Each restore makes a new one."""

    base: int | ForeignBase
    """Slot of the commit, or the other writer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NextClaim:
    """A claim after this process's first. It may or may not be in the log until its request is answered."""

    body: ClaimRequest
    origin: Origin | None = None
    """The origin that it continues from; None if it begins a branch."""

    branch_step: int | None = None
    """The first step of the branch; None if it continues from `origin`."""


class RootClaims(ABC):
    """Make the claims of one trainer, one after another, and hold the newest."""

    def __init__(self, claiming: ClaimRequest) -> None:
        """Store the claim to make, `claiming`, which has no base yet. Nothing is claimed yet."""
        self._claiming = claiming
        self.choose_foreign_step: Callable[[], ForeignBase | None] = lambda: None
        """Called before a claim, in a root that has another writer's steps but no commit, to choose the step to
        continue from.
        """

        self.claimed_root: ClaimedRoot | None = None
        """The newest claim; None before the first."""

        self._origin: Origin | None = None
        """The origin of the newest claim; None if it continues from HEAD."""

        self._next_claim: _NextClaim | None = None
        """The next claim while its outcome is unknown."""

    @abstractmethod
    def ensure_process(self) -> CompanionProcess:
        """Return the running companion process, and start one if there is none."""

    @property
    def _held_claim(self) -> Claim | None:
        """The claim that a new companion process may take over.

        None before the first, and while the next one may be in the log: requesting that one proves this one too.
        """
        if self._next_claim is not None or self.claimed_root is None:
            return None
        return self.claimed_root.claim

    def claim_root(self, *, origin: Origin | None = None, unrestored_step: int | None = None) -> ClaimedRoot:
        """Claim the root for this process, which continues from `origin`, or else from HEAD.

        A repeated call with the same origin returns the same claim. A new origin that isn't HEAD needs the next claim.

        A process that hasn't restored all of the state that it saves passes its next step as `unrestored_step`. If
        HEAD's step isn't smaller, a branch begins with this step. Raises FencedError if another process has claimed
        the root.
        """
        process = self.ensure_process()
        if self._next_claim is not None:
            self.claimed_root = self._request_next_claim(process, self._next_claim)
        if self.claimed_root is None:
            body = self._claiming if origin is None else _set_claim_base(self._claiming, origin)
            self.claimed_root = self._request_first_claim(process, body)
            self._origin = origin
        elif origin is not None and origin is not self._origin:
            self.claimed_root = self._claim_next(process, origin)
        if unrestored_step is not None and not self.claimed_root.branching:
            head = self.claimed_root.base or self.claimed_root.legacy
            if must_branch(head, unrestored_step):
                self.claimed_root = self._claim_next(process, branch_step=unrestored_step)
        return self.claimed_root

    def read_latest(self) -> CommitRecord | ForeignBase | None:
        """Return the commit, or another writer's step, that is HEAD now. Claim the root first if need be."""
        if self.claimed_root is None:
            claimed = self.claim_root()
        else:
            process = self.ensure_process()
            self._settle_next_claim(process)
            claimed = self._request_claim(process, Kind.REFRESH, {})
        return claimed.base or claimed.legacy

    def _settle_next_claim(self, process: CompanionProcess) -> None:
        """Find out whether the requested next claim is in the log. If it isn't, claim HEAD in its place."""
        if (next_claim := self._next_claim) is not None:
            from_head = replace(next_claim.body, base=None, legacy=None, branch=False)
            self.claimed_root = self._request_next_claim(process, replace(next_claim, body=from_head))

    def _claim_next(
        self, process: CompanionProcess, origin: Origin | None = None, *, branch_step: int | None = None
    ) -> ClaimedRoot:
        """Make the next claim, which continues from `origin`, or begins a branch with `branch_step`."""
        assert self.claimed_root is not None
        body = replace(self._claiming, after=self.claimed_root.claim, nonce=new_nonce())
        body = replace(body, branch=True) if origin is None else _set_claim_base(body, origin)
        self._next_claim = _NextClaim(body=body, origin=origin, branch_step=branch_step)
        try:
            return self._request_next_claim(process, self._next_claim)
        except StorageError as error:
            if not isinstance(error, TransientStorageError | UnknownOutcomeError):
                # The store refused the first put: the next claim can't be in the log.
                self._next_claim = None
            raise

    def _request_next_claim(self, process: CompanionProcess, next_claim: _NextClaim) -> ClaimedRoot:
        try:
            claimed = self._request_claim(process, Kind.CLAIM, encode(next_claim.body))
        except (FencedError, RestoreError):
            # The next claim isn't in the log, and is given up.
            self._next_claim = None
            raise
        self._next_claim = None
        # After `_settle_next_claim` the claim may continue from HEAD instead.
        if next_claim.origin is not None and _is_claim_from(claimed, next_claim.origin):
            self._origin = next_claim.origin
        if next_claim.branch_step is not None and claimed.branching:
            _warn_of_branch(claimed, next_claim.branch_step)
        return claimed

    def _request_first_claim(self, process: CompanionProcess, body: ClaimRequest) -> ClaimedRoot:
        try:
            return self._request_claim(process, Kind.CLAIM, encode(body))
        except ForeignStepsError:
            # Only a process with torch, such as this one, can read another writer's step.
            body = replace(body, offer=self.choose_foreign_step())
            return self._request_claim(process, Kind.CLAIM, encode(body))

    def _request_claim(self, process: CompanionProcess, kind: Kind, body: dict[str, Any]) -> ClaimedRoot:
        """Send a request whose answer is the claim."""
        return decode(ClaimedRoot, process.send_request(kind, body, timeout_s=CLAIM_S))


def _is_claim_from(claimed: ClaimedRoot, origin: Origin) -> bool:
    """Return whether `claimed` continues from `origin`."""
    if isinstance(origin.base, ForeignBase):
        return claimed.legacy is not None and claimed.legacy.folder == origin.base.folder
    return claimed.base is not None and claimed.base.slot == origin.base


def _set_claim_base(body: ClaimRequest, origin: Origin) -> ClaimRequest:
    """Return `body` with `origin` as the claim's base."""
    if isinstance(origin.base, ForeignBase):
        return replace(body, legacy=origin.base)
    return replace(body, base=origin.base)


def _warn_of_branch(claimed: ClaimedRoot, step: int) -> None:
    latest = claimed.base or claimed.legacy
    assert latest is not None
    _log.warning(
        "step %d begins a new branch: this process hasn't restored all of the state that it saves, and the root "
        "is at step %d already (%s). To continue from there, call restore(state) with this whole state before the "
        "first save. For another training, use another root. The earlier commits stay until this branch has passed "
        "their steps",
        step,
        latest.step,
        latest.folder,
        extra={"step": step},
    )

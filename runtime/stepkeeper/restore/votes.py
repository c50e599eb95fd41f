"""Let the ranks of a restore act as one: rank 0 chooses, all ranks act, and a failure in one is raised in all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import (
    NoticeDeadlineError,
    PeerLostError,
    TornCheckpointError,
    decode_error,
    encode_error,
    text_with_notes,
)
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable
from stepkeeper.restore.peers.links import PeerStoppedError
from stepkeeper.time_limits import CLAIM_S
from stepkeeper_planners import errors as planners_errors
from stepkeeper_planners.errors import LoadMismatchError, PlannerError

__all__ = ["TornVote", "Votes", "decode_rank_error", "encode_rank_error", "find_first_error"]

_MISMATCH: Final = ("missing", "unexpected", "mismatched", "ranks", "advice", "loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class TornVote:
    """A vote in which at least one rank had read bad bytes."""

    reason: str
    own_error: TornCheckpointError | None
    """The error of this rank, if it read bad bytes itself."""


class Votes:
    """Hold votes, each under a name of its own. All ranks call the same methods in the same order."""

    def __init__(self, rank_group: RankGroup, waits: Waits) -> None:
        self._rank_group = rank_group
        self._waits = waits
        self._number = 0

    def new_name(self) -> str:
        """Make a name, used once, for the next common action."""
        self._number += 1
        return f"restore/{self._number}"

    def choose_in_rank_0(self, choose: Callable[[], Restorable | None]) -> Restorable | None:
        """Let rank 0 choose a checkpoint, and return its choice, or raise its error, in every rank.

        Rank 0 chooses only after all ranks have arrived, so that it writes nothing before they are all there.
        """
        name = self.new_name()
        limits = self._rank_group.limits
        self._rank_group.gather(f"{name}/met", {}, limits.apart_s)
        choice: dict[str, Any] | None = None
        failure: Exception | None = None
        if self._rank_group.rank == 0:
            try:
                # It calls the store and the companion, which may be stuck.
                choice = _encode_choice(self._waits.run(choose))
            except Exception as error:  # raised below, once the others have been notified
                failure = error
                choice = {"error": encode_error(error)}
        choice = self._rank_group.broadcast(f"{name}/choice", choice, 2 * limits.apart_s + CLAIM_S)
        if failure is not None:
            raise failure
        if "error" in choice:
            raise decode_error(choice["error"])
        if "legacy" in choice:
            return decode(ForeignRecord, choice["legacy"])
        return decode(CommitRecord, choice["commit"]) if "commit" in choice else None

    def act_together(
        self,
        name: str,
        act: Callable[[], dict[str, Any]],
        judge: Callable[[Sequence[dict[str, Any]]], Exception | None] = lambda _: None,
    ) -> TornVote | None:
        """Call `act` in every rank, and raise the error of any one in all, but return why bytes are bad.

        `act` returns this rank's report as plain JSON values. `judge` is called in rank 0 with the reports of
        all ranks, by rank, and the error that it returns is raised in all.
        """
        failure: Exception | None = None
        own: TornCheckpointError | None = None
        try:
            vote = act()
        except TornCheckpointError as error:
            own = error
            vote = {"torn": str(error)}
        except PeerStoppedError as error:
            # The rank that failed votes too, and reports the kind of its failure.
            vote = {"stopped": str(error)}
        except (PeerLostError, NoticeDeadlineError):
            # A lost rank no longer votes, and all ranks detect the loss. Nor does a rank past its deadline.
            raise
        except Exception as error:  # raised below, once the others have been notified
            failure = error
            vote = {"error": encode_rank_error(error, self._rank_group.rank)}
        silence_s = self._rank_group.limits.silence_s
        by_rank = self._rank_group.gather(name, vote, silence_s)
        worst = find_first_error(by_rank)
        if by_rank and worst is None and (judged := judge(by_rank)) is not None:
            worst = encode_rank_error(judged, self._rank_group.rank)
        torn = next((each["torn"] for each in by_rank if "torn" in each), None)
        stopped = next((each["stopped"] for each in by_rank if "stopped" in each), None)
        # The rank whose failure has stopped others reports its kind. If it doesn't, all that is known is the text.
        if worst is None and torn is None and stopped is not None:
            worst = encode_rank_error(PeerLostError(stopped), self._rank_group.rank)
        # Errors come first: an error that isn't the commit's fault must not condemn it.
        answer = {"error": worst} if worst is not None else {} if torn is None else {"torn": torn}
        answer = self._rank_group.broadcast(f"{name}/worst", answer, 2 * silence_s)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise decode_rank_error(answer["error"])
        return TornVote(reason=str(answer["torn"]), own_error=own) if "torn" in answer else None


def _encode_choice(choice: Restorable | None) -> dict[str, Any]:
    """Encode the choice of rank 0 for the other ranks."""
    if choice is None:
        return {}
    return {"legacy" if isinstance(choice, ForeignRecord) else "commit": encode(choice)}


def encode_rank_error(error: Exception, rank: int) -> dict[str, Any]:
    """Encode the error that `rank` fails with, so that the other ranks can raise it."""
    answer: dict[str, Any] = {**encode_error(error), "message": text_with_notes(error), "rank": rank}
    if isinstance(error, LoadMismatchError):
        answer["mismatch"] = {name: getattr(error, name) for name in _MISMATCH}
    return answer


def decode_rank_error(answer: dict[str, Any]) -> Exception:
    """Make the error that another rank failed with: stepkeeper's or the planners', else a CompanionError."""
    if "mismatch" in answer:
        return LoadMismatchError(**answer["mismatch"])
    message = f"rank {answer['rank']}: {answer['message']}"
    kind = getattr(planners_errors, answer["kind"], None)
    if isinstance(kind, type) and issubclass(kind, PlannerError) and _takes_text(kind):
        return kind(message)
    return decode_error({"kind": answer["kind"], "message": message})


def find_first_error(answers: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Find the first error among the answers of all ranks; None if no rank failed."""
    return next((each["error"] for each in answers if "error" in each), None)


def _takes_text(kind: type[PlannerError]) -> bool:
    """Return whether the class is made from a message; some compose their own."""
    return not any("__init__" in vars(each) for each in kind.__mro__ if issubclass(each, PlannerError))

"""What the ranks do together while they restore: rank 0 chooses, all act, one failure is everybody's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import Gang
from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import GangError, TornCheckpointError
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import LegacyRecord, Restorable
from stepkeeper.restore.mismatch import error_said, first_error, raised_from
from stepkeeper.restore.peers.links import PeerStoppedError

__all__ = ["TIMEOUT_S", "Agreement", "Torn"]

TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """Some rank has read bytes bad."""

    said: str
    own: TornCheckpointError | None
    """What this rank has met, if it has."""


class Agreement:
    """The ranks of one restore after another; each name is used once."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._number = 0

    def name(self) -> str:
        """A name for what all ranks do next."""
        self._number += 1
        return f"restore/{self._number}"

    def on(self, choose: Callable[[], Restorable | None]) -> Restorable | None:
        """What rank 0 chooses, after all ranks have met: it writes nothing before they are all there."""
        name = self.name()
        self._gang.gather(f"{name}/met", {}, TIMEOUT_S)
        choice: dict[str, Any] | None = None
        failure: Exception | None = None
        if self._gang.rank == 0:
            try:
                choice = _told(choose())
            except Exception as error:  # raised below, once the others have been told
                failure = error
                choice = {"error": encode_error(error)}
        choice = self._gang.broadcast(f"{name}/choice", choice, TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in choice:
            raise decode_error(choice["error"])
        if "legacy" in choice:
            return decode(LegacyRecord, choice["legacy"])
        return decode(CommitRecord, choice["commit"]) if "commit" in choice else None

    def together(
        self,
        name: str,
        act: Callable[[], dict[str, Any]],
        judge: Callable[[Sequence[dict[str, Any]]], Exception | None] = lambda _: None,
    ) -> Torn | None:
        """All ranks have acted, and none failed; else why bytes are bad.

        What the ranks say of it is for rank 0 to judge: the error is raised in all of them.

        """
        failure: Exception | None = None
        own: TornCheckpointError | None = None
        try:
            said = act()
        except TornCheckpointError as error:
            own = error
            said = {"torn": str(error)}
        except PeerStoppedError as error:
            # That rank says it too, and which kind of failure it was.
            said = {"stopped": str(error)}
        except GangError:
            # Who is lost votes no more, and all know.
            raise
        except Exception as error:  # raised below, once the others have been told
            failure = error
            said = {"error": error_said(error, self._gang.rank)}
        by_rank = self._gang.gather(name, said, TIMEOUT_S)
        worst = first_error(by_rank)
        if by_rank and worst is None and (judged := judge(by_rank)) is not None:
            worst = error_said(judged, self._gang.rank)
        torn = next((each["torn"] for each in by_rank if "torn" in each), None)
        stopped = next((each["stopped"] for each in by_rank if "stopped" in each), None)
        if worst is None and torn is None and stopped is not None:
            worst = error_said(GangError(stopped), self._gang.rank)
        # An error comes first: what is no fault of the commit's condemns none.
        answer = {"error": worst} if worst is not None else {} if torn is None else {"torn": torn}
        answer = self._gang.broadcast(f"{name}/worst", answer, TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise raised_from(answer["error"])
        return Torn(said=str(answer["torn"]), own=own) if "torn" in answer else None


def _told(choice: Restorable | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {"legacy" if isinstance(choice, LegacyRecord) else "commit": encode(choice)}

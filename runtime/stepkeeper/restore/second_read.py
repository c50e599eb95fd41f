"""Read bad bytes again on another node: bytes that are bad in the store condemn a commit, a bad node doesn't."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from stepkeeper.checkpoint.reread import reread_bad_bytes
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import BadBytes, BadItem, BadNodeError, RestoreError, TornCheckpointError
from stepkeeper.log.foreign_steps import METADATA
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.restore.votes import decode_rank_error, encode_rank_error, find_first_error
from stepkeeper.storage import Store
from stepkeeper_planners.errors import ValueDecodeError

__all__ = ["Host", "Question", "Reading", "confirm_bad", "find_question", "this_host"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FRESH_READS: Final = 2
"""The number of second readings if there is one host only, each over a connection of its own."""

Bad = BadBytes | BadItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine that a rank runs on."""

    name: str
    """Its name, for people."""

    machine: str
    """An id that all processes of one machine share, even in different containers; every machine has its own."""


def this_host() -> Host:
    """Describe the machine that this process runs on."""
    name = socket.gethostname()
    try:
        return Host(name=name, machine=_BOOT_ID.read_text().strip())
    except OSError:
        return Host(name=name, machine=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A rank's report of its reading."""

    host: Host
    reason: str | None = None
    """Why it is bad; None if nothing was bad."""

    bad_bytes: BadBytes | None = None
    bad_item: BadItem | None = None
    missing: bool = False
    """True if no object was there."""

    @property
    def bad(self) -> Bad | None:
        return self.bad_bytes or self.bad_item


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The bytes to read again, and the rank that reads them."""

    first: int
    """The rank that read them bad."""

    reader: int | None = None
    """The rank that reads them again, on another host if there is one. None: a rank there has read them bad already."""

    other: Host
    """The host of that rank."""

    reading: Reading
    """The report of the first rank."""


def find_question(readings: Sequence[Reading]) -> Question | None:
    """Choose the bytes to read again by the ranks' reports; None if no rank knows which bytes were bad. Pure."""
    first = next((rank for rank, each in enumerate(readings) if each.bad is not None), None)
    if first is None:
        return None
    reading = readings[first]
    elsewhere = [rank for rank, each in enumerate(readings) if each.host.machine != reading.host.machine]
    agreeing = next((rank for rank in elsewhere if readings[rank].bad == reading.bad), None)
    if agreeing is not None:
        return Question(first=first, reader=None, other=readings[agreeing].host, reading=reading)
    reader = elsewhere[0] if elsewhere else first
    return Question(first=first, reader=reader, other=readings[reader].host, reading=reading)


def confirm_bad(
    name: str,
    rank_group: RankGroup,
    host: Host,
    torn: TornCheckpointError | None,
    reopen: Callable[[], Store],
    *,
    was_deleted: Callable[[], bool] = lambda: False,
    waits: Waits | None = None,
) -> str:
    """Confirm by a second reading that bytes are bad, and return why, and which nodes have read them so.

    The second reading is on another host; or, if there is only one, over two more connections of this one. All
    ranks call this if one of them has read bad bytes, and all raise the same error.

    Args:
        name: A name for this exchange; used once.
        rank_group: The ranks.
        host: Where this rank runs.
        torn: The error of this rank, if it has met one.
        reopen: Opens the root over a connection of its own.
        was_deleted: Returns whether the log has deleted the commit. Rank 0 calls it if objects are missing,
            and there is no other fault.
        waits: Ends the waits for the store.

    Raises:
        RestoreError: The commit was deleted while it was read.
        BadNodeError: One host reads good bytes where another one read bad ones.
        TornCheckpointError: No rank knows which bytes were bad.
        StorageError: The second reading got no answer. That proves nothing about the bytes.
    """
    waits = waits or Waits()
    silence_s = rank_group.limits.silence_s
    readings = rank_group.gather(f"{name}/read", encode(_reading(host, torn)), silence_s)
    choice: dict[str, Any] | None = None
    if rank_group.rank == 0:
        decoded = [decode(Reading, each) for each in readings]
        choice = waits.run(partial(_find_question_or_error, decoded, was_deleted))
    choice = rank_group.broadcast(f"{name}/asked", choice, 2 * silence_s)
    if "error" in choice:
        raise decode_rank_error(choice["error"])
    if "unknown" in choice:
        raise TornCheckpointError(str(choice["unknown"]))
    question = decode(Question, choice["question"])
    own = waits.run(partial(_read_again, question, rank_group.rank, reopen))
    again = rank_group.gather(f"{name}/again", own, silence_s)
    verdict: dict[str, Any] | None = None
    if rank_group.rank == 0:
        error = find_first_error(again)
        wrong = [str(text) for each in again for text in each.get("wrong", ())]
        good = any(each.get("good") for each in again)
        verdict = {"error": error} if error is not None else _verdict(question, good=good, wrong=wrong)
    verdict = rank_group.broadcast(f"{name}/verdict", verdict, 2 * silence_s)
    if "error" in verdict:
        raise decode_rank_error(verdict["error"])
    if "good" in verdict:
        raise BadNodeError(str(verdict["good"]))
    return str(verdict["bad"])


def _find_question_or_error(readings: Sequence[Reading], was_deleted: Callable[[], bool]) -> dict[str, Any]:
    """Turn the ranks' reports, in rank 0, into a question, or into the error that all ranks raise."""
    bad = [each for each in readings if each.reason is not None]
    reason = next((each.reason for each in bad), "")
    try:
        # The log has the deletion before the first object is deleted.
        if bad and all(each.missing for each in bad) and was_deleted():
            gone = RestoreError(
                f"the commit was deleted while it was read, and can't be read again: {reason}"
            )
            return {"error": encode_rank_error(gone, 0)}
    except Exception as error:  # all ranks raise it: without the log it may be deleted or torn
        return {"error": encode_rank_error(error, 0)}
    question = find_question(readings)
    return {"unknown": reason} if question is None else {"question": encode(question)}


def _reading(host: Host, torn: TornCheckpointError | None) -> Reading:
    if torn is None:
        return Reading(host=host)
    bad = torn.bad
    return Reading(
        host=host,
        reason=str(torn),
        bad_bytes=bad if isinstance(bad, BadBytes) else None,
        bad_item=bad if isinstance(bad, BadItem) else None,
        missing=torn.missing,
    )


def _read_again(question: Question, rank: int, reopen: Callable[[], Store]) -> dict[str, Any]:
    """Read the bytes again if this rank is the reader, each time over a new connection."""
    if rank != question.reader or question.reading.bad is None:
        return {}
    wrong = []
    try:
        for _ in range(_FRESH_READS if question.reader == question.first else 1):
            store = reopen()
            try:
                found = _find_fault(store, question.reading.bad)
            finally:
                store.close()
            if found is None:
                return {"good": True}
            wrong.append(found)
    except Exception as error:  # all ranks raise it: a reading without an answer proves nothing
        return {"error": encode_rank_error(error, rank)}
    return {"wrong": wrong}


def _find_fault(store: Store, bad: Bad) -> str | None:
    """Find the present fault of the bytes; None if there is none."""
    if isinstance(bad, BadBytes):
        return reread_bad_bytes(store, bad)
    try:
        content = open_content(store, bad.folder)
        if bad.chunk is not None:
            content.read_chunk(bad.name, bad.chunk)
        elif bad.name != METADATA:
            content.read_value(bad.name)
    except TornCheckpointError as error:
        return str(error)
    except (RestoreError, ValueDecodeError):
        # The bytes are as they were written, but of a kind that isn't read here.
        return None
    return None


def _verdict(question: Question, *, good: bool, wrong: Sequence[str]) -> dict[str, str]:
    """Compose the text of the outcome. One good reading proves that the store's bytes are good."""
    first, other, reason = question.reading.host.name, question.other.name, question.reading.reason
    alone = question.reader == question.first
    if good:
        where = "over a fresh connection" if alone else f"where node {other} reads good ones"
        good_too = ", and good ones " if alone else " "
        return {
            "good": f"node {first} (rank {question.first}) reads bad bytes{good_too}{where}: {reason}. The checkpoint "
            "is intact and was not condemned: check that node's memory, disk cache and network, or start without it"
        }
    by = f"node {first}, also over fresh connections" if alone else f"nodes {first} and {other}"
    more = f"; read again: {wrong[-1]}" if wrong else ""
    return {"bad": f"{reason} (read bad by {by}{more})"}

"""Find entries that came into an emptied slot after later ones were written. Pure."""

from stepkeeper.errors import LogFormatError
from stepkeeper.log.replay import apply
from stepkeeper.repair.evidence import Entries, find_start
from stepkeeper.repair.partial_replay import PartialReplay

__all__ = ["find_intruder"]


def find_intruder(entries: Entries) -> int | None:
    """Find the slot of an entry that the ones behind it contradict.

    Who writes an entry has read the one before it. So the entry that was read there is another one: somebody has
    removed it, and a process that had not come so far took the slot for the next free one.

    Args:
        entries: The log by slot; None for what is damaged or gone.

    Returns:
        The slot of the first one; None if there is none, or the entry before the contradiction can't be read.

    """
    start, state = find_start(entries)
    exact = True
    for slot in range(start + 1, len(entries)):
        entry = entries[slot]
        try:
            if exact and entry is not None:
                state = apply(state, slot, entry)
                continue
            exact = False
            lost = [each for each, found in enumerate(entries) if found is None and each > start]
            replay = PartialReplay(state, lost, {})
            replay.read(slot, entry)
            state = replay.state
        except LogFormatError:
            return slot - 1 if slot > 0 and entries[slot - 1] is not None else None
    return None

"""Move a snapshot's copies from the devices into its region, in the background, and wait for them."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from traceback import clear_frames
from typing import Final

from stepkeeper.coordination.waits import SilenceLimit
from stepkeeper.errors import SaveError, StepkeeperError
from stepkeeper.save.report import SaveClock
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot

__all__ = ["await_transfer", "transfer_snapshot"]

_LOOK_S: Final = 0.5
"""The interval at which the wait for a transfer checks its progress."""


def transfer_snapshot(snapshot: Snapshot, region: Region, clock: SaveClock) -> None:
    """Move the copies. Raises StepkeeperError if they didn't come from the devices."""
    try:
        snapshot.move_copies(region)
    except BaseException as error:
        # The remaining copies aren't needed. The error is kept until the save's turn, but not its frames' variables.
        snapshot.drop_copies()
        each: BaseException | None = error
        while each is not None:
            clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, StepkeeperError) or not isinstance(error, Exception):
            raise
        raise SaveError(f"the copies of the state did not come from the devices: {error}") from error
    clock.mark_transferred()


def await_transfer(
    transfer: Future[None], snapshot: Snapshot, limit_s: float, note_moved: Callable[[int], None]
) -> Exception | None:
    """Wait until the snapshot is in its region, as long as copies arrive. Return the error; None if there is none.

    `limit_s` may pass without progress. `note_moved` is called with the bytes that came since the last call.
    """
    limit = SilenceLimit(limit_s, time.monotonic())
    moved_bytes = 0
    while True:
        try:
            transfer.result(min(_LOOK_S, limit_s))
        except TimeoutError as error:
            if transfer.done():
                if transfer.exception() is error:
                    return error
                continue  # it has ended since the wait
        except Exception as error:  # raised later, after the ranks have compared their states
            return error
        else:
            return None
        before, moved_bytes = moved_bytes, snapshot.moved_bytes
        if moved_bytes != before:
            note_moved(moved_bytes - before)
            limit.restart(time.monotonic())
        elif limit.is_over(time.monotonic()):
            return SaveError(
                f"the copies of the state did not come from the devices: nothing came for {limit_s:.0f} s"
            )

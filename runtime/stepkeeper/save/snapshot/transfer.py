"""Move a snapshot's copies from the devices into its region, behind the train thread."""

import time
from traceback import clear_frames

from stepkeeper.errors import SaveError, StepkeeperError
from stepkeeper.save.report import SaveClock
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot
from stepkeeper.time_limits import TimeLimits

__all__ = ["transfer_snapshot"]


def transfer_snapshot(snapshot: Snapshot, region: Region, clock: SaveClock, limits: TimeLimits) -> None:
    """Move the copies, and measure how long that takes.

    Raises:
        SaveError: The copies didn't come from the devices.
        StepkeeperError: As above, for a reason that is known.

    """
    began_s = time.monotonic()
    try:
        snapshot.move_copies(region)
    except BaseException as error:
        # The remaining copies aren't needed. The error is kept until the save's turn, its frames' variables are not.
        snapshot.drop_copies()
        each: BaseException | None = error
        while each is not None:
            clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, StepkeeperError) or not isinstance(error, Exception):
            raise
        raise SaveError(f"the copies of the state did not come from the devices: {error}") from error
    limits.record_transfer(snapshot.transfer_bytes, time.monotonic() - began_s)
    clock.mark_transferred()

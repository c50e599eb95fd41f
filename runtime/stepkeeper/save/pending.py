"""Track the saves of this process that have not ended, and lend them the memory for their snapshots."""

import time
from typing import Final

from stepkeeper.coordination.waits import Waits
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.snapshot.region import Region

__all__ = ["PendingSaves"]


class PendingSaves:
    """Keep the saves that have not ended in the order of their start, and the regions that none of them uses.

    One thread at a time starts a save, which gets a region, and gives it back in the thread that runs it.
    """

    def __init__(self, n_regions: int, waits: Waits) -> None:
        """Create `n_regions` empty regions: as many snapshots may be in host memory."""
        self._waits = waits
        self._saves: list[InFlight] = []
        self._free_regions: Final = [Region() for _ in range(n_regions)]

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended."""
        newest = self._saves[-1] if self._saves else None
        return None if newest is None or newest.done else newest

    @property
    def next_region(self) -> Region:
        """The region that the next save gets, while no other thread starts one."""
        return self._free_regions[-1]

    def add(self, save: InFlight) -> None:
        """Add a save that was started: the newest one now."""
        self._saves.append(save)

    def drop(self, save: InFlight) -> None:
        """Forget a save that failed to start."""
        self._saves = [each for each in self._saves if each is not save]

    def is_newest(self, save: InFlight) -> bool:
        """Return True if no later save was started."""
        return not self._saves or save is self._saves[-1]

    def take_region(self, timeout_s: float | None) -> Region:
        """Wait for a region that no save needs, and take it; raises TimeoutError, or as `Waits.check`."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._free_regions:
            left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            oldest = next((each for each in self._saves if not each.region_released.done()), None)
            if oldest is None:
                # One was lost: a signal handler raised an exception between taking it and using it.
                return Region()
            if not self._waits.await_all([oldest.region_released], left_s):
                raise TimeoutError(
                    f"the save of step {oldest.step} was still in flight after {timeout_s:.1f} s"
                )
            self._drop_ended()
        self._drop_ended()
        return self._free_regions.pop()

    def give_back(self, region: Region) -> None:
        """Let another save use the region."""
        self._free_regions.append(region)

    def release_region(self, region: Region, save: InFlight) -> None:
        """Let another save use the region of `save`, which continues without its snapshot."""
        self.give_back(region)
        save.region_released.set_result(None)

    def wait_until_idle(self, timeout_s: float | None) -> bool:
        """Wait until all saves have ended. Returns and raises what `Waits.await_all` does."""
        return self._waits.await_all([save.future for save in self._saves], timeout_s)

    def close(self) -> None:
        """Give back the memory that no save uses."""
        for region in self._free_regions:
            region.close()

    def _drop_ended(self) -> None:
        self._saves = [save for save in self._saves if not save.done]

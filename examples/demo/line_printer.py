"""Print the events of a demo, a line at a time."""

import time
from dataclasses import dataclass

__all__ = ["LinePrinter"]


@dataclass(frozen=True, slots=True)
class LinePrinter:
    started_unix_s: float

    def __call__(self, text: str, at_unix_s: float | None = None) -> None:
        """Print a line with the time since the job was applied."""
        elapsed_s = int((at_unix_s or time.time()) - self.started_unix_s)
        print(f"{elapsed_s // 60:3d}:{elapsed_s % 60:02d}  {text}", flush=True)

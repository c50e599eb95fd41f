"""One conversion in a process of its own, and by how many bytes its memory grew: convert.py CALL SRC DST.

convert.py make FOLDER FILE_BYTES LARGEST_BYTES writes what is converted.
"""

import re
import sys
import threading
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDSavePlanner, formats


class AnonymousMemory:
    """The most that this process had while the block ran, beyond what it had before."""

    def __enter__(self) -> Self:
        self._before_bytes = self._most_bytes = _anonymous_bytes()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._watch.join()

    @property
    def grown_bytes(self) -> int:
        return self._most_bytes - self._before_bytes

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self._most_bytes = max(self._most_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def make(folder: Path, file_bytes: int, largest_bytes: int) -> None:
    from safetensors.torch import save_file

    n_rows = largest_bytes // 4096
    # Of one piece of memory each in the files, but not here.
    one = torch.arange(largest_bytes // 4, dtype=torch.float32).reshape(n_rows, 1024)
    state: dict[str, Any] = {f"layer{index}": one + index for index in range(file_bytes // largest_bytes)}
    torch.save(state, folder / "made.pt")
    save_file(state, folder / "made.safetensors")
    writer = FileSystemWriter(folder / "made", sync_files=False)
    save(state, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)


def main() -> None:
    call, src, dst = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if call == "make":
        make(src, int(dst), int(sys.argv[4]))
        return
    with AnonymousMemory() as memory:
        getattr(formats, call)(src, dst)
    print(memory.grown_bytes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

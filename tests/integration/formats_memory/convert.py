"""One conversion in a process of its own, and by how many bytes its memory grew: convert.py CALL SRC DST.

convert.py make FOLDER FILE_BYTES LARGEST_BYTES writes what is converted.
"""

import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDSavePlanner, formats


def grown_bytes(act: Callable[[], object]) -> int:
    """Return the most that this process had while it did that, beyond what it had before."""
    seen, is_over = [anonymous_bytes()], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            seen.append(anonymous_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        act()
    finally:
        is_over.set()
        watch.join()
    return max(seen) - seen[0]


def anonymous_bytes() -> int:
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
    print(grown_bytes(lambda: getattr(formats, call)(src, dst)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

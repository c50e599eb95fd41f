"""One conversion in a process of its own, and by how many bytes its memory grew: convert.py CALL SRC DST."""

import re
import sys
import threading
import warnings
from pathlib import Path

from stepkeeper_planners import formats


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    """Print the most that this process had meanwhile, beyond what it had before."""
    seen, is_over = [anonymous_bytes()], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            seen.append(anonymous_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        getattr(formats, sys.argv[1])(Path(sys.argv[2]), sys.argv[3])
    finally:
        is_over.set()
        watch.join()
    print(max(seen) - seen[0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

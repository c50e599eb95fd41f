"""Run Python blocks as they come, in one namespace: python page_interpreter.py FOLDER STATUS_FD < PATHS."""

import os
import sys
import traceback
from pathlib import Path

folder, status = sys.argv[1], int(sys.argv[2])
os.chdir(folder)
sys.path[0] = folder
sys.argv = [""]
page = {"__name__": "__main__"}
for line in sys.stdin:
    path = line.strip()
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), page)
    except BaseException:
        traceback.print_exc()
        os.write(status, b"failed\n")
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(status, b"done\n")

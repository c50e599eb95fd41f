"""A launcher that takes long to end behind its rank, as torchrun may on a busy machine: slow_end.py FOLDER [S]."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from stepkeeper.contract import TORCHRUN_VARIABLE, ExitCode, Termination

FOLDER = Path(sys.argv[1])


def stop(*_: object) -> NoReturn:
    (FOLDER / "termination").write_bytes(Termination(code=ExitCode.SAVED, notice="sigterm").to_json())
    os._exit(ExitCode.SAVED)


def main() -> None:
    if TORCHRUN_VARIABLE in os.environ:
        signal.signal(signal.SIGTERM, stop)
        (FOLDER / "runs-0").touch()
        time.sleep(600)
    environ = os.environ | {TORCHRUN_VARIABLE: "none"}
    rank = subprocess.Popen([sys.executable, __file__, str(FOLDER)], env=environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank.wait()
    (FOLDER / "ends").touch()
    time.sleep(float(sys.argv[2]) if sys.argv[2:] else 600)
    sys.exit(1)


if __name__ == "__main__":
    main()

"""A launcher that doesn't end after its rank, as torchrun may on a busy machine: slow_end.py FOLDER."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.process_end.launcher_folder import sign_on

FOLDER = Path(sys.argv[1])


def stop(*_: object) -> NoReturn:
    (FOLDER / "termination").write_bytes(Termination(code=ExitCode.SAVED, notice="sigterm").to_json())
    os._exit(ExitCode.SAVED)


def train() -> None:
    signal.signal(signal.SIGTERM, stop)
    sign_on()
    (FOLDER / "runs-0").write_text(str(os.getpid()))
    time.sleep(600)


def main() -> None:
    rank = subprocess.Popen([sys.executable, __file__, str(FOLDER), "rank"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank.wait()
    (FOLDER / "ends").touch()
    time.sleep(600)


if __name__ == "__main__":
    train() if sys.argv[2:] else main()

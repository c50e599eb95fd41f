"""The scripts of the pages on trainers do what the pages say: stopped and started again, they print the same."""

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from page_blocks import read_blocks

RUN = """
import os, signal, sys


class Output:
    def __init__(self, stream, stop_after):
        self._stream, self._left = stream, stop_after

    def write(self, text):
        written = self._stream.write(text)
        self._left -= text.count("\\n")
        if text.endswith("\\n") and self._left <= 0:
            self._left = sys.maxsize
            os.kill(os.getpid(), signal.SIGTERM)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)


sys.stdout = Output(sys.stdout, int(sys.argv[1]))
exec(compile(open(sys.argv[2], encoding="utf-8").read(), sys.argv[2], "exec"), {"__name__": "__main__"})
"""
"""Run the script, and send it SIGTERM after some of the lines that it prints."""

pytestmark = pytest.mark.timeout(1200)
NEVER = 1 << 30
LOSSES = tuple("0123456789{")
"""How lines with losses begin: with the epoch, or as a dict."""


@pytest.mark.parametrize("page", ["transformers.md", "accelerate.md", "lightning.md", "wandb.md"])
def test_the_script_resumes_exactly(
    trainers_server: ForkServer, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (script,) = (block for block in read_blocks(f"docs/user/{page}") if block.file == "train.py")
    (tmp_path / "train.py").write_text(script.text, encoding="utf-8")
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")

    def run(folder: str, stop_after: int) -> tuple[int, list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [tmp_path / "run.py", stop_after, tmp_path / "train.py"]
        done = trainers_server.run(command, cwd=tmp_path / folder, timeout=400)
        assert done.returncode in (0, 75), done.stderr[-4000:]
        # Trainers print more at each start, and a summary with times.
        lines = [line for line in done.stdout.splitlines() if line[:1] in LOSSES and "_runtime" not in line]
        return done.returncode, lines

    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    code, undisturbed = run("undisturbed", NEVER)
    assert code == 0
    assert len(undisturbed) > 20
    lines: list[str] = []
    code, n_starts = 75, 0
    while code == 75 and n_starts < 10:
        most = 20 if n_starts == 0 else len(undisturbed)
        code, more = run("stopped", chance.randrange(1, most))
        lines, n_starts = lines + more, n_starts + 1
    assert code == 0
    assert n_starts > 1, "it was never stopped"
    assert lines == undisturbed
    if page == "wandb.md":
        starts = sorted((tmp_path / "stopped/wandb").glob("offline-run-*/*.wandb"))
        assert [start.name for start in starts] == ["run-llm-7.wandb"] * n_starts
        assert [step for start in starts for step in _read_logged(start)] == list(range(1, 41))


def _read_logged(path: Path) -> Iterator[int]:
    """Yield the steps in what W&B would have sent. The file is a log as of LevelDB, of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                yield record.history.step.num

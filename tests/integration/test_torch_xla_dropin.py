"""One import is changed, and the same code sees the same: attributes, plans, data, subclasses, what is restored."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import stepkeeper

SCRIPT = Path(__file__).parent / "torch_xla_dropin" / "user.py"
THEIRS = "torch_xla.experimental.distributed_checkpoint"


def seen_with(module: str, folder: Path) -> Any:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, SCRIPT, module, folder],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "seen.json").read_text())


def test_same_code_sees_the_same(tmp_path: Path) -> None:
    ours = seen_with("stepkeeper", tmp_path / "ours")
    theirs = seen_with(THEIRS, tmp_path / "theirs")
    assert len(ours["by hand"]["items"]) > 10
    assert len(ours["through subclasses"]["asked by the reader"]) > 20
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part


def test_constructors_take_no_arguments_if_need_be() -> None:
    for name in ("SPMDSavePlanner", "SPMDLoadPlanner"):
        parameters = inspect.signature(getattr(stepkeeper, name)).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters), name
    assert list(inspect.signature(stepkeeper.prime_optimizer).parameters) == ["optimizer"]

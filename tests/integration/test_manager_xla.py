"""The manager on tensors that torch_xla shards over four devices, in processes of their own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SHARDED = Path(__file__).parent / "manager_trainer" / "sharded.py"


@pytest.mark.smoke
def test_saves_disturb_nothing_and_a_restored_training_goes_on_bit_by_bit(
    run_on_devices: Callable[..., str], max_isa: str, tmp_path: Path
) -> None:
    uri = (tmp_path / "root").as_uri()
    saved = json.loads(run_on_devices(SHARDED, "save", uri, max_isa=max_isa).splitlines()[-1])
    assert saved["same"], "random numbers and arithmetic are those of a training that never saves"
    assert saved["later_compilations"] == 0, "neither a step nor a snapshot is compiled again"
    restored = json.loads(run_on_devices(SHARDED, "restore", uri, max_isa=max_isa).splitlines()[-1])
    assert restored["step"] == 5
    assert restored["bits"] == saved["bits"]
    assert "devices=[2,2]" in restored["specs"][0]

"""Faults of torch_xla's planners and of torch's own, found by running them, each beside what ours do.

What theirs do is asserted too: where one of these fails, they have changed, and what is said about them is out of date.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

SCRIPTS = Path(__file__).parent / "torch_xla_faults"
RANKS = 4

ON_DEVICES: dict[str, tuple[str, str]] = {
    # A partially replicated chunk is twice in one plan; both are taken for the surplus one.
    "partial_replication_is_stored": ("full", "full partial"),
    "partial_replication_is_restored": ("KeyError: 'w'", "True"),
    "copies_are_not_moved": ("2.0", "1.0"),
    # They move what is about to be overwritten, for buffers of its shape.
    "a_load_moves_nothing_from_the_devices": ("1.0", "0.0"),
    # torch's stager copies a storage that this kind of tensor hasn't got.
    "saved_in_the_background": ("RuntimeError: .*invalid python storage.*", "1.0"),
    # https://github.com/pytorch/pytorch/issues/191391
    "a_thread_of_the_writer_fails": ("committed, 1 of 2 files", "LostWritesError: .*layer.*"),
    # Read with weights_only=True, which knows neither numpy's arrays nor their constructors.
    "random_number_generators": ("UnpicklingError: Weights only load failed.*", "True"),
    "another_shape": (
        r"\[0\.0, 1\.0, 2\.0, 3\.0\]",
        r"LoadMismatchError: .*w: shape \(8,\) in the checkpoint, \(4,\) in the state.*",
    ),
    "another_dtype": (
        r"\[0, 1, 2, 3\]",
        "LoadMismatchError: .*w: dtype float32 in the checkpoint, int32 in the state.*",
    ),
    "two_names_are_missing": (
        r"RuntimeError: Missing key in checkpoint state_dict: first\.",
        "LoadMismatchError: .*first, second.*",
    ),
    # They keep {"f": 1.0} as one value where torch gives each entry a name.
    "names_of_stock": (r"RuntimeError: Missing key in checkpoint state_dict: a\.", r"\{'f': 1\.0\}"),
    # The compiler shards what the user left alone, in part, and that is lost as above.
    "documented_loop": (r"RuntimeError: Missing key in checkpoint state_dict: model\.0\.bias\.", "True"),
    "manual_sharding": (
        "RuntimeError: .*Unsupported OpSharding type 4.*",
        "UnsupportedShardingError: w: its sharding is MANUAL.*",
    ),
    "fewer_rows_than_devices": ("KeyError: 'v'", r"\[\[0\.0, 1\.0, 2\.0\], \[0\.0\]\]"),
    "tied_tensors_are_written_once": ("2", "1"),
    "primed_parameters_stay": ("False", "True"),
}

ALL_ON_FIRST, EVEN = [8, 0, 0, 0], [2, 2, 2, 2]
ON_RANKS: dict[str, dict[str, Any]] = {
    "replicated": {"stock": ALL_ON_FIRST, "theirs": ALL_ON_FIRST, "ours": EVEN},
    "replicated_layers": {"stock": EVEN, "theirs": ALL_ON_FIRST, "ours": EVEN},
    "hybrid_sharded": {"stock": [4, 4, 0, 0], "theirs": [4, 4, 0, 0], "ours": EVEN},
    # Every rank gets rank 0's: the others' are lost without a word.
    "value_of_each_rank": {"stock": 0, "theirs": 0},
    # Stock unpickles values with weights_only=False.
    "code_in_a_value": {"stock": "ran", "theirs": "refused", "ours": "refused"},
}


@pytest.fixture(scope="module")
def on_devices(
    run_on_devices: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("devices")
    run_on_devices(SCRIPTS / "devices.py", folder)
    results: dict[str, dict[str, str]] = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def on_ranks(
    devices_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    errors = [folder / f"stderr-{rank}" for rank in range(RANKS)]
    processes = []
    try:
        for rank, file in enumerate(errors):
            command = [SCRIPTS / "ranks.py", rank, RANKS, folder]
            with file.open("w") as stderr:
                processes.append(
                    devices_server.start(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
                )
        for process, file in zip(processes, errors, strict=True):
            assert process.wait(240) == 0, file.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", ON_DEVICES)
def test_on_four_devices(name: str, on_devices: dict[str, dict[str, str]]) -> None:
    theirs, ours = ON_DEVICES[name]
    seen = on_devices[name]
    assert re.fullmatch(ours, seen["ours"], re.DOTALL), seen["ours"]
    assert re.fullmatch(theirs, seen["theirs"], re.DOTALL), f"torch_xla changed: {seen['theirs']}"


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_four_ranks(name: str, on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in on_ranks:
        assert {whose: rank[whose][name] for whose in ON_RANKS[name]} == ON_RANKS[name]


def test_value_that_differs_is_refused_on_every_rank(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in on_ranks:
        seen = rank["ours"]["value_of_each_rank"]
        assert all(
            re.match(r"RanksDifferError: .*loader\.seen.*PerRank", each, re.DOTALL) for each in seen
        ), seen


def test_value_of_each_rank_comes_back(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    seen = [rank["ours"]["value_of_each_rank_said_so"] for rank in on_ranks]
    assert seen == [{"seen": rank * 10} for rank in range(RANKS)]

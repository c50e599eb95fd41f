"""Planners on several real ranks: all kinds of tensors in one state, pipeline stages, groups, even files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

SCRIPTS = Path(__file__).parent / "planners_ranks"
Place = tuple[str, tuple[int, ...] | None]


def test_all_kinds_in_one_state_on_4_then_3_then_1_ranks(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(SCRIPTS / "mixed.py", 4, tmp_path, "save:ours:a:0", "load:ours:a:4")
    launch(SCRIPTS / "mixed.py", 3, tmp_path, "load:ours:a:4", "save:ours:b:0")
    launch(SCRIPTS / "mixed.py", 1, tmp_path, "load:ours:b:3")


def test_stock_reads_ours_and_ours_reads_stocks_byte_for_byte(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPTS / "mixed.py", 4, tmp_path, "save:ours:both-ways-ours:0", "save:stock:both-ways-stock:0")
    launch(SCRIPTS / "mixed.py", 2, tmp_path, "load:stock:both-ways-ours:4", "load:ours:both-ways-stock:4")

    ours, stocks = blobs(tmp_path / "both-ways-ours"), blobs(tmp_path / "both-ways-stock")
    # Stock lists empty shards too.
    assert stocks.keys() - ours.keys() == {("cut.few_of_many", (9, 0))}
    assert ours.keys() <= stocks.keys()
    different = {fqn for fqn, offsets in ours if ours[fqn, offsets] != stocks[fqn, offsets]}
    # Stock writes strides and the conjugate bit, ours the elements. Values are encoded in another way.
    assert {fqn for fqn in different if fqn.startswith(("cut.", "tied.", "plain."))} <= {
        "plain.0",
        "plain.3",
        "plain.4.step",
    }


def blobs(checkpoint: Path) -> dict[Place, bytes]:
    found = {}
    for index, info in FileSystemReader(checkpoint).read_metadata().storage_data.items():
        data = (checkpoint / info.relative_path).read_bytes()
        place = (index.fqn, None if index.offset is None else tuple(index.offset))
        found[place] = data[info.offset : info.offset + info.length]
    return found


@pytest.mark.smoke
def test_stages_that_know_their_own_layers_only_are_saved_and_joined(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    actions = ("save:a", "load:a", "async_save:by_stepkeeper", "load:by_stepkeeper")
    launch(SCRIPTS / "titan.py", 4, tmp_path, 2, *actions)
    launch(SCRIPTS / "titan.py", 2, tmp_path, 1, "load:by_stepkeeper")


@pytest.mark.parametrize("scenario", ["in_a_group", "in_another_process"])
def test_ranks_are_those_of_the_group(launch: Callable[..., None], tmp_path: Path, scenario: str) -> None:
    launch(SCRIPTS / "groups.py", 3, tmp_path, scenario)


def test_stages_that_have_optimizers_of_their_own_give_them_all_of_torchs_names(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPTS / "optimizers.py", 2, tmp_path, "stages")


@pytest.mark.parametrize("scenario", ["ddp", "compiled_ddp", "fsdp2", "fsdp1", "fsdp1_original"])
def test_an_optimizer_of_a_wrapped_module_is_named_as_torch_names_it(
    launch: Callable[..., None], tmp_path: Path, scenario: str
) -> None:
    launch(SCRIPTS / "optimizers.py", 2, tmp_path, scenario)

"""`load` in one process with our planner: torch's own readers, what torch and older writers left, what goes wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import override

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import CastError, LoadMismatchError


class Counter:
    def __init__(self, n: int) -> None:
        self.n, self.history = n, torch.full((3,), float(n))

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.history = state["history"]


def make_state(seed: int) -> dict[str, Any]:
    shared = torch.arange(6.0) + seed
    return {
        "model": {
            "w": torch.arange(12.0).reshape(3, 4) + seed,
            "half": torch.full((5,), seed, dtype=torch.bfloat16),
        },
        "turned": (torch.arange(12.0).reshape(3, 4) + seed).t(),
        "tied": {"embed": shared, "head": shared},
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "counter": Counter(seed),
        "nested": {"groups": [{"lr": 0.1 * seed}], "betas": (0.9, seed), "none": None},
        "step": seed,
    }


def assert_loaded(state: dict[str, Any], seed: int) -> None:
    want = make_state(seed)
    for name in ("turned", "scalar", "empty"):
        assert torch.equal(state[name], want[name])
    for group in ("model", "tied"):
        for name in want[group]:
            assert torch.equal(state[group][name], want[group][name])
    assert state["counter"].n == seed
    assert torch.equal(state["counter"].history, want["counter"].history)
    assert state["nested"] == want["nested"]
    assert state["step"] == seed


def load(state: dict[str, Any], folder: Path, reader: Any = None, **rules: Any) -> SPMDLoadPlanner:
    planner = SPMDLoadPlanner(**rules)
    dcp_load(state, storage_reader=reader or FileSystemReader(folder), planner=planner, no_dist=True)
    return planner


def cause(error: CheckpointException) -> BaseException:
    ((failure, _trace),) = error.failures.values()
    return failure


def refused(state: dict[str, Any], folder: Path, **rules: Any) -> LoadMismatchError:
    with pytest.raises(CheckpointException) as caught:
        load(state, folder, **rules)
    found = cause(caught.value)
    assert isinstance(found, LoadMismatchError)
    return found


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    dcp_save(
        make_state(7), storage_writer=FileSystemWriter(tmp_path), planner=SPMDSavePlanner(), no_dist=True
    )
    return tmp_path


def test_what_torch_wrote_and_what_we_wrote(tmp_path: Path, folder: Path) -> None:
    stock = tmp_path / "stock"
    dcp_save(make_state(7), checkpoint_id=stock, no_dist=True)
    for place in (stock, folder):
        state = make_state(1)
        addresses = state["model"]["w"].data_ptr(), state["turned"].data_ptr()
        load(state, place)
        assert_loaded(state, 7)
        assert addresses == (state["model"]["w"].data_ptr(), state["turned"].data_ptr())
    state = make_state(1)
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    assert_loaded(state, 7)


def test_what_torch_before_2_4_and_torch_xla_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They store a dict without tensors as one value."""
    with monkeypatch.context() as patch:
        patch.setattr(_version, "_derived_version", "2_3")
        dcp_save({**make_state(7), "sgd": {"state": {}}}, checkpoint_id=tmp_path, no_dist=True)
    names = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "nested" in names
    assert "nested.none" not in names
    state = {**make_state(1), "sgd": {"state": {}}}
    load(state, tmp_path)
    assert_loaded(state, 7)
    del state["nested"]["none"]
    state["nested"]["new"] = 1
    with pytest.raises(CheckpointException, match=r"not in the checkpoint \(1\): nested.new"):
        load(state, tmp_path)


def test_part_of_a_checkpoint(folder: Path) -> None:
    state = {"model": make_state(1)["model"]}
    error = refused(state, folder)
    assert not any(name.startswith("model") for name in error.unexpected)
    assert "exclude=('counter', 'empty', " in str(error)
    planner = load(state, folder, items=["model"])
    assert torch.equal(state["model"]["w"], make_state(7)["model"]["w"])
    assert planner.unread == ()
    state = make_state(1)
    planner = load(state, folder, items=["model.w"])
    assert "step" in planner.skipped
    assert torch.equal(state["model"]["w"], make_state(7)["model"]["w"])
    assert torch.equal(state["model"]["half"], make_state(1)["model"]["half"])
    assert (state["step"], state["counter"].n) == (1, 1)


EIGHT_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


# Some torch versions would make their largest number of what is beyond eight bits.
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ([1, 300], torch.int8),
        ([-1], torch.uint8),
        ([1, 70_000], torch.float16),
        ([1e30], torch.float16),
        *(([1.0, large], dtype) for dtype in EIGHT_BITS for large in (1e39, -1e39)),
        *(([torch.inf], dtype) for dtype in EIGHT_BITS if dtype is not torch.float8_e5m2),
    ],
)
def test_numbers_that_the_other_dtype_cant_say_are_refused(
    tmp_path: Path, stored: list[float], dtype: torch.dtype
) -> None:
    wide = torch.int64 if isinstance(stored[0], int) else torch.float64
    dcp_save({"w": torch.tensor(stored, dtype=wide)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(len(stored), dtype=dtype)}
    with pytest.raises(CheckpointException, match=f"w: .* is out of the range of {dtype}") as caught:
        load(state, tmp_path, cast=True)
    assert isinstance(cause(caught.value), CastError)


def test_a_mismatch_changes_nothing(folder: Path) -> None:
    state = {**make_state(1), "scalar": torch.zeros(2), "more": 1}
    refused(state, folder)
    assert_loaded({**state, "scalar": torch.tensor(1.0)}, 1)


class Breaking(FileSystemReader):
    """A disk that fails after some reads."""

    def __init__(self, folder: Path, n_good: int) -> None:
        super().__init__(folder)
        self.n_good = n_good

    @override
    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        super().read_data(LoadPlan([*values, *tensors[: self.n_good]]), planner)
        raise OSError("the disk is gone")


def test_after_a_read_that_fails_values_and_objects_are_as_before(folder: Path) -> None:
    state = make_state(1)
    with pytest.raises(CheckpointException, match="the disk is gone"):
        load(state, folder, Breaking(folder, 3))
    assert (state["step"], state["counter"].n, state["nested"]) == (1, 1, make_state(1)["nested"])


def test_an_expanded_tensor_is_refused_by_name_before_anything_is_read(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(3), "w": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"a": torch.zeros(3), "w": torch.zeros(2, 1).expand(2, 3)}
    assert "clone()" in refused(state, tmp_path).mismatched["w"]
    assert not state["a"].any()
    load(state, tmp_path, exclude=["w"])
    assert state["a"].all()


def tied(**others: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    tensor = torch.zeros(4)
    return tensor, {"embed": tensor, "head": tensor, **others}


def test_equal_elements_stored_twice_are_one_tensors(tmp_path: Path) -> None:
    shared = torch.tensor([1.0, float("nan"), -0.0, 3.0])
    dcp_save({"embed": shared, "head": shared.clone()}, checkpoint_id=tmp_path, no_dist=True)
    tensor, state = tied()
    planner = load(state, tmp_path)
    assert torch.equal(tensor.view(torch.int32), shared.view(torch.int32))
    # Nothing else tells that they are equal.
    assert len(planner._pending.items) == 2


@pytest.fixture(name="untied")
def _untied(tmp_path: Path) -> Path:
    state = {"embed": torch.arange(4.0), "head": torch.arange(4.0) * 2, "step": 7}
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_different_elements_are_an_error_that_names_both(untied: Path) -> None:
    _, state = tied(step=1)
    with pytest.raises(CheckpointException) as caught:
        load(state, untied)
    ((error, _trace),) = caught.value.failures.values()
    assert isinstance(error, LoadMismatchError)
    assert set(error.mismatched) == {"head"}
    assert "embed and head are one tensor in the state, and have different elements" in str(error)
    assert "exclude=('head',) loads the elements of embed" in str(error)
    assert state["step"] == 1


@pytest.mark.parametrize(("excluded", "factor"), [("head", 1), ("embed", 2)])
def test_one_of_the_names_is_chosen(untied: Path, excluded: str, factor: int) -> None:
    tensor, state = tied(step=1)
    planner = load(state, untied, exclude=[excluded])
    assert torch.equal(tensor, torch.arange(4.0) * factor)
    assert len(planner._pending.items) == 2
    assert state["step"] == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_infinity_is_converted_where_there_is_one(tmp_path: Path, dtype: torch.dtype) -> None:
    dcp_save({"w": torch.tensor([torch.inf])}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(1, dtype=dtype)}
    load(state, tmp_path, cast=True)
    assert state["w"].float().item() == torch.inf


# `pytest.warns` gives torch's warning again, without its module.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_in_a_load_of_what_both_have_they_are_a_warning(untied: Path) -> None:
    tensor, state = tied(step=1)
    with pytest.warns(UserWarning, match="embed and head are one tensor .* those of embed were loaded"):
        load(state, untied, strict=False)
    assert torch.equal(tensor, torch.arange(4.0))
    assert state["step"] == 7

"""A nested state, flat and back, with the names of torch.distributed.checkpoint, and what each rank has of its own."""

from types import MappingProxyType
from typing import Any

import pytest
import torch

from stepkeeper_planners.errors import DuplicateNameError, SourceError, UnsupportedValueError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.nesting import rebuild_nesting
from stepkeeper_planners.state.per_rank import PerRank, parse_stored_name, stored_name
from stepkeeper_planners.state.structure import StructureCache
from stepkeeper_planners.state.tree import flatten_state


class Counter:
    """A user's own object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.count = state["count"]


def test_the_order_of_a_dict_doesnt_change_which_of_tied_names_stands() -> None:
    tied = torch.ones(2)
    for state in ({"a": tied, "b": tied, "c": tied}, {"c": tied, "b": tied, "a": tied}):
        flat = flatten_state(state)
        assert list(flat.tensors) == ["a"]
        assert flat.aliases == {"b": "a", "c": "a"}


def test_views_of_one_storage_are_not_tied() -> None:
    storage = torch.arange(8.0)
    number = torch.view_as_complex(storage.view(4, 2))
    views = {
        "all": storage,
        "first": storage[:4],
        "last": storage[4:],
        "every": storage[::2],
        "bits": storage.view(torch.int32),
        "grid": storage.view(2, 4),
        "number": number,
        "conjugate": number.conj(),
        "imaginary": number.imag,
        "negated": number.conj().imag,
        "same": storage.detach(),
        "same first": storage[0:4],
        # The addresses of what has no memory are all alike.
        "empty": torch.empty(0, 2),
        "another empty": torch.empty(2, 0),
        "on no device": torch.empty(3, device="meta"),
        "also on no device": torch.empty(3, device="meta"),
    }
    assert flatten_state(views).aliases == {"same": "all", "same first": "first"}


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
    state = {"optimizer": optimizer}
    flat = flatten_state(state)
    flat.tensors["optimizer.param_groups.0.lr"].fill_(0.5)
    finish_load(state, flat, {"optimizer.param_groups.0.weight_decay": 0.25})
    (group,) = optimizer.param_groups
    assert group["lr"] is rate
    assert (rate.item(), group["weight_decay"]) == (0.5, 0.25)


def test_the_error_tells_a_number_from_its_text() -> None:
    with pytest.raises(DuplicateNameError, match=r"\('a', '1'\) and \('a', 1\) are both named 'a\.1'"):
        flatten_state({"a": {1: 2, "1": 3}})
    with pytest.raises(DuplicateNameError, match=r"\('a', 'b\.0'\) and \('a', 'b', 0\) are both named"):
        flatten_state({"a": {"b": [torch.ones(1)], "b.0": 1}, "a.b.0": 2})


def test_a_container_that_cant_be_changed_is_named_before_anything_is() -> None:
    counter = Counter(1)
    state = {"first": 0, "counter": counter, "frozen": MappingProxyType({"x": 1})}
    flat = flatten_state(state)
    with pytest.raises(UnsupportedValueError, match=r"frozen\.x.*mappingproxy"):
        finish_load(state, flat, {"first": 1, "frozen.x": 2})
    assert (state["first"], counter.loads) == (0, 0)
    finish_load(state, flat, {"first": 1})
    assert (state["first"], counter.loads) == (1, 1)


ENDLESS: list[Any] = [1]
ENDLESS.append((ENDLESS,))
REFUSED: dict[str, tuple[Any, str]] = {
    "an object in a tuple": ((Counter(1),), r"m\.a.* tuple; use a list"),
    "an object deep in a tuple": ((1, [{"deep": Counter(1)}]), r"m\.a.* tuple; use a list"),
    "a value of each rank in a tuple": ((PerRank(1),), r"m\.a.* tuple; use a list"),
    "a lazy parameter": (torch.nn.UninitializedParameter(), r"m\.a: a lazy parameter"),
    "a list that holds itself": (ENDLESS, "contains itself"),
    "a tuple that holds itself": (ENDLESS[1], "contains itself"),
    "what holds one that holds itself": ([ENDLESS], "contains itself"),
}


@pytest.mark.parametrize(("value", "says"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_stored_is_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(UnsupportedValueError, match=says):
        flatten_state({"m": {"a": value, "w": torch.ones(2)}})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_and_its_parts_are_not(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(
        UnsupportedValueError, match=r"m\.rows: a nested tensor can't be stored; .*unbind\(\)"
    ):
        flatten_state({"m": {"rows": nested}})
    assert list(flatten_state({"m": {"rows": list(nested.unbind())}}).tensors) == ["m.rows.0", "m.rows.1"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("note", [False, True], ids=["all ordinary", "one with an attribute"])
def test_a_tensor_that_becomes_nested_is_refused_by_name(note: bool) -> None:
    cache = StructureCache(lambda _flat, _sizes: None)
    state = {"rows": torch.ones(2), "w": torch.ones(2)}
    if note:
        state["w"].note = "seen"  # type: ignore[attr-defined]  # programs do so
    cache.look_up(state)
    state["rows"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedValueError, match="rows: a nested tensor can't be stored"):
        cache.look_up(state)


class Worker:
    """An object that marks a part of its state itself."""

    def __init__(self, own: int) -> None:
        self.own = own

    def state_dict(self) -> dict[str, Any]:
        return {"own": PerRank(self.own), "shared": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


def test_it_comes_back_in_place() -> None:
    saved = flatten_state({"a": PerRank(Counter(3)), "deep": [PerRank(5)], "w": Worker(7)})
    counter, box, worker = Counter(0), PerRank(None), Worker(0)
    state = {"a": PerRank(counter), "deep": [box], "w": worker}
    finish_load(state, flatten_state(state), saved.per_rank)
    assert (counter.count, box.value, worker.own) == (3, 5, 7)
    assert state["a"].value is counter  # type: ignore[attr-defined]  # a tree of unlike values


def test_stored_names_are_read_as_they_were_made() -> None:
    for fqn in ("a", "a.b", "", "x@1/2", "new\nline"):
        assert parse_stored_name(stored_name(fqn, Ranks(rank=1, world_size=2))) == (fqn, 1, 2)
    for name in ("a", "a@1", "a@2/2", "a@01/2", "a@1/02", "a@-1/2", "a@0/0", "a@1/2 "):
        assert parse_stored_name(name) is None


def test_an_entry_with_the_name_of_a_stored_one_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"a@0/2.*'a' of rank 0"):
        flatten_state({"a": PerRank(1), "a@0/2": 1})
    assert flatten_state({"b": PerRank(1), "a@0/2": 1}).values == {"a@0/2": 1}


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param({"w": ("x",), "v": ("x", "y")}, id="one in another"),
        pytest.param({"w": ("x", 10**9)}, id="a long list"),
        pytest.param({"w": ("x", 0), "v": ("x", "y")}, id="a list that is a dict"),
        pytest.param({"w": 3}, id="a number"),
        pytest.param({"w": (1.5,)}, id="half"),
        pytest.param({"w": ("9" * 5000,), "w\0number": ("9" * 5000,)}, id="a number that is too long"),
        pytest.param({"w": ("x",), "v": ("x",)}, id="two in one place"),
        pytest.param({"w": ("x",), "v\0empty": ("x",)}, id="an empty dict in its place"),
        pytest.param(
            {"w": ("1",), "v": ("01",), "a\0number": ("1",), "b\0number": ("01",)}, id="one number twice"
        ),
    ],
)
def test_paths_that_are_none_are_refused(paths: Any) -> None:
    with pytest.raises(SourceError, match=r"^run/\.metadata: the path .* of '\w+"):
        rebuild_nesting({"w": 1, "v": [1]}, paths, where="run/.metadata")

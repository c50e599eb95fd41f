"""Comparing the forms of many ordinary tensors at once."""

from collections.abc import Callable

import pytest
import torch

from stepkeeper_planners.adapters.forms import OrdinaryForms


class Own(torch.Tensor):
    """A program's own class of tensors."""


def make() -> list[torch.Tensor]:
    # More than are compared at once, and the one that the tests change is among the last.
    return [torch.ones(2, 3) for _ in range(3000)]


def give_attribute(tensor: torch.Tensor) -> None:
    tensor.note = "seen"  # type: ignore[attr-defined]  # programs do so


def set_data(other: torch.Tensor) -> Callable[[torch.Tensor], None]:
    return lambda tensor: setattr(tensor, "data", other)


@pytest.mark.parametrize(
    "change",
    [
        set_data(torch.ones(3, 2)),
        set_data(torch.ones(2, 3, 1)),
        set_data(torch.ones(2, 3, dtype=torch.float16)),
        give_attribute,
    ],
    ids=["shape", "dimension", "dtype", "attribute"],
)
def test_a_tensor_that_gets_another_form_in_place_is_noticed(change: Callable[[torch.Tensor], None]) -> None:
    tensors = make()
    forms = OrdinaryForms(tensors)
    assert forms.compare(tensors) == (True, True)
    change(tensors[-1])
    assert forms.compare(tensors) == (False, False)


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 3).to_sparse(), torch.empty(2, 3, device="meta"), torch.ones(2, 3).as_subclass(Own)],
    ids=["layout", "device", "class"],
)
def test_a_tensor_of_another_kind_is_noticed(other: torch.Tensor) -> None:
    tensors = make()
    forms = OrdinaryForms(tensors)
    tensors[-1] = other
    assert forms.compare(tensors) == (False, False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_is_noticed_without_asking_for_its_shape() -> None:
    # It has none, and raises an error that torch's guards don't catch: the process would end.
    tensors = make()
    forms = OrdinaryForms(tensors)
    tensors[-1] = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)])
    assert forms.compare(tensors) == (False, False)
    # Also one that begins where the earlier tensor did.
    tensors = make()
    forms = OrdinaryForms(tensors)
    tensors[-1] = torch.nested.as_nested_tensor(tensors[-1])
    assert forms.compare(tensors) == (False, False)


@pytest.mark.parametrize(
    "other",
    [torch.ones(3, 2).t(), torch.ones(2, 3, requires_grad=True), torch.nn.Parameter(torch.ones(2, 3))],
    ids=["strides", "gradient", "parameter"],
)
def test_what_does_not_count_makes_no_other_form(other: torch.Tensor) -> None:
    tensors = make()
    forms = OrdinaryForms(tensors)
    tensors[-1] = other
    assert forms.compare(tensors) == (True, False)


def test_tensors_that_moved_or_share_a_place_are_not_where_they_were() -> None:
    tensors = make()
    forms = OrdinaryForms(tensors)
    tensors[0].data = torch.ones(2, 3)
    assert forms.compare(tensors) == (True, False)
    # They were tied already when their forms were noted.
    tied = [*tensors, tensors[0]]
    assert OrdinaryForms(tied).compare(tied) == (True, False)
    tied[-1] = tensors[0].detach()
    assert OrdinaryForms(tied).compare(tied) == (True, False)

"""Writes that torch doesn't count are seen in any tensor of floats, in whatever order its elements lie."""

from collections.abc import Callable

import pytest
import torch

from stepkeeper.unbroken import LastState

LAID_OUT: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(4, 3, 5, 5),
    "channels_last": lambda: torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(6, 7).t(),
    "with gaps": lambda: torch.zeros(6, 8)[1:5, 2:6],
    "every other one": lambda: torch.zeros(20)[::2],
    "one element, many times": lambda: torch.zeros(1).expand(9),
    "one element": lambda: torch.zeros(()),
    "of half": lambda: torch.zeros(3, 3, dtype=torch.bfloat16).t(),
}


@pytest.mark.parametrize("lies", LAID_OUT)
def test_a_write_past_torchs_count_is_seen(lies: str) -> None:
    weight = torch.nn.Parameter(LAID_OUT[lies]())
    last = LastState()
    last.finished(1, {"w": weight, "b": torch.zeros(3)})
    assert last.intact() is not None
    weight.data.fill_(1.0)
    assert last.intact() is None
    last.finished(2, {"w": weight, "b": torch.zeros(3)})
    assert last.intact() is not None
    last.close()


def test_a_weight_in_channels_last_of_a_module_that_is_written_to_by_hand() -> None:
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's
    last = LastState()
    last.finished(1, {"model": model})
    assert not model.weight.is_contiguous()
    model.weight.data -= 0.1
    assert last.intact() is None
    last.close()


def test_what_others_write_into_the_gaps_of_a_tensor_is_none_of_its_writes() -> None:
    whole = torch.zeros(8, 8)
    last = LastState()
    last.finished(1, {"w": whole[:, :3]})
    whole.data[:, 3:] = 1.0
    assert last.intact() is not None
    last.close()

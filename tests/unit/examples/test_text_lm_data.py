import itertools
import random

import numpy as np
import pytest
import torch

from text_lm.data import Loader, ShuffledBatches, noisy_batch


def _batches(first: int, count: int) -> list[list[int]]:
    sampler = ShuffledBatches(n_windows=23, batch_size=4, seed=3)
    sampler.first = first
    return list(itertools.islice(sampler, count))


@pytest.mark.parametrize("first", [0, 1, 4, 5, 6, 13])
def test_the_batches_from_any_position_on_are_those_of_the_whole_run(first: int) -> None:
    assert _batches(first, 10) == _batches(0, first + 10)[first:]


def test_noise_comes_from_both_generators_and_leaves_targets_alone() -> None:
    windows = torch.arange(4 * 65).view(4, 65) % 256

    def run(python_seed: int, numpy_seed: int) -> list[torch.Tensor]:
        random.seed(python_seed)
        rng = np.random.default_rng(numpy_seed)
        made = [noisy_batch(windows, rng) for _ in range(6)]
        assert all(torch.equal(targets, windows[:, 1:]) for _, targets in made)
        return [inputs for inputs, _ in made]

    def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert equal(run(1, 2), run(1, 2))
    assert not equal(run(1, 2), run(7, 2))
    assert not equal(run(1, 2), run(1, 7))


def test_a_position_in_another_text_is_refused() -> None:
    saved = Loader(b"a" * 1000, window=10, batch_size=2, seed=1).state_dict()
    with pytest.raises(ValueError, match="text_sha256"):
        Loader(b"b" * 1000, window=10, batch_size=2, seed=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="seed"):
        Loader(b"a" * 1000, window=10, batch_size=2, seed=2).load_state_dict(saved)

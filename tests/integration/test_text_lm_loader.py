"""The loader with its worker processes: what a checkpoint holds is what the trainer consumed."""

import itertools
import random

import torch

from text_lm.data import Loader

TEXT = random.Random(5).randbytes(4000)


def loader() -> Loader:
    return Loader(TEXT, window=16, batch_size=8, seed=7)


def test_a_restored_loader_goes_on_behind_the_last_batch_that_was_consumed() -> None:
    whole = loader()
    n_batches = 2 * whole.batches_per_epoch + 3
    batches = iter(whole)
    first = list(itertools.islice(batches, whole.batches_per_epoch + 5))
    saved = whole.state_dict()
    rest = list(itertools.islice(batches, n_batches - len(first)))

    restored = loader()
    restored.load_state_dict(saved)
    again = list(itertools.islice(iter(restored), len(rest)))

    assert saved["batches"] == len(first)
    assert restored.epoch == 2
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))

import itertools

import pytest

from text_lm.data import Loader, ShuffledBatches


def _batches(first: int, count: int) -> list[list[int]]:
    sampler = ShuffledBatches(n_windows=23, batch_size=4, seed=3)
    sampler.first = first
    return list(itertools.islice(sampler, count))


@pytest.mark.parametrize("first", [0, 1, 4, 5, 6, 13])
def test_the_batches_from_any_position_on_are_those_of_the_whole_run(first: int) -> None:
    assert _batches(first, 10) == _batches(0, first + 10)[first:]


def test_a_position_in_another_text_is_refused() -> None:
    saved = Loader(b"a" * 1000, window=10, batch_size=2, seed=1).state_dict()
    with pytest.raises(ValueError, match="text_sha256"):
        Loader(b"b" * 1000, window=10, batch_size=2, seed=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="seed"):
        Loader(b"a" * 1000, window=10, batch_size=2, seed=2).load_state_dict(saved)

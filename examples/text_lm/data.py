"""Real text that is on every machine, as shuffled batches whose position can be saved in mid-epoch."""

import hashlib
import multiprocessing
import os
import random
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

Batch = tuple[Tensor, Tensor]


class LoaderState(TypedDict):
    text_sha256: str
    seed: int
    batches: int
    """Consumed by the trainer since the first epoch began; what workers have prefetched doesn't count."""


def library_text(size_bytes: int) -> bytes:
    """Read the first `size_bytes` of the source files of Python's standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            return bytes(text[:size_bytes])
    raise ValueError(f"{folder} holds only {len(text)} bytes of source files; asked for {size_bytes}")


class Windows(Dataset[Tensor]):
    """Windows of the text that follow each other, each one byte longer than the model's, for the last target."""

    def __init__(self, text: bytes, window: int) -> None:
        self._text = text
        self._window = window

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._window

    @override
    def __getitem__(self, index: int) -> Tensor:
        start = index * self._window
        return torch.tensor(list(self._text[start : start + self._window + 1]))


class ShuffledBatches(Sampler[list[int]]):
    """Batches of indices without end from batch `first` on; each epoch's order follows from seed and epoch."""

    def __init__(self, *, n_windows: int, batch_size: int, seed: int) -> None:
        self._n_windows = n_windows
        self._batch_size = batch_size
        self._seed = seed
        self.first = 0

    @property
    def per_epoch(self) -> int:
        """The windows that do not fill a batch are left out, others in each epoch."""
        return self._n_windows // self._batch_size

    @override
    def __iter__(self) -> Iterator[list[int]]:
        epoch, batch = divmod(self.first, self.per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._n_windows, generator=generator).tolist()
            for start in range(batch, self.per_epoch):
                yield order[start * self._batch_size : (start + 1) * self._batch_size]
            epoch, batch = epoch + 1, 0


class Loader:
    """Batches from worker processes, without end. Saved and restored at the batch that was consumed last."""

    def __init__(self, text: bytes, *, window: int, batch_size: int, seed: int) -> None:
        windows = Windows(text, window)
        self._sampler = ShuffledBatches(n_windows=len(windows), batch_size=batch_size, seed=seed)
        self._state = LoaderState(text_sha256=hashlib.sha256(text).hexdigest(), seed=seed, batches=0)
        context = multiprocessing.get_context("forkserver")
        # The workers are forked from a process of their own, which never sees XLA's threads and sockets.
        context.set_forkserver_preload([__name__])
        self._loader = DataLoader(
            windows,
            batch_sampler=self._sampler,
            num_workers=2,
            multiprocessing_context=context,
            worker_init_fn=end_with_trainer,
            generator=torch.Generator(),
        )

    @property
    def epoch(self) -> int:
        """The epoch of the batch consumed last."""
        return max(0, self._state["batches"] - 1) // self._sampler.per_epoch

    @property
    def batches_per_epoch(self) -> int:
        return self._sampler.per_epoch

    def __iter__(self) -> Iterator[Tensor]:
        self._sampler.first = self._state["batches"]
        for batch in self._loader:
            self._state["batches"] += 1
            yield batch

    def state_dict(self) -> LoaderState:
        return self._state.copy()

    def load_state_dict(self, state: LoaderState) -> None:
        """Let the next iteration continue after the saved position.

        Raises:
            ValueError: The position is one in another text, or of another seed.

        """
        for key in ("text_sha256", "seed"):
            if state[key] != self._state[key]:
                raise ValueError(f"the checkpoint's {key} is {state[key]}, this run's is {self._state[key]}")
        self._state = state.copy()


def end_with_trainer(_worker: int) -> None:
    """Make this worker end when the trainer does, even by SIGKILL: its parent is the fork server, not the trainer."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


_NOISE_RATES = (0.0, 0.05, 0.1)


def noisy_batch(windows: Tensor, rng: np.random.Generator) -> Batch:
    """Return inputs with some bytes replaced by random ones, and the true next bytes.

    Python's `random` chooses how many, numpy's generator which and by what: both are part of the training's
    state.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    rate = random.choice(_NOISE_RATES)
    replaced = torch.from_numpy(rng.random(inputs.shape) < rate)
    noise = torch.from_numpy(rng.integers(256, size=inputs.shape))
    return torch.where(replaced, noise, inputs), targets.contiguous()

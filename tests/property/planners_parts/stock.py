"""What tests need of torch that not every release has in one place, or has without a warning."""

import warnings

import torch

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter  # type: ignore[import-not-found]  # since torch 2.15
except ModuleNotFoundError:
    # Its only home up to torch 2.14.
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter", "quantized_tensor"]


def quantized_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        # torch 2.15 deprecates them.
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)

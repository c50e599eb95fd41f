"""What tests need of torch that not every release has without a warning."""

import warnings

import torch


def quantized_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        # torch 2.15 deprecates them.
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)

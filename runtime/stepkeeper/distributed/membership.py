"""Describe the place of one process among those that train together."""

from dataclasses import dataclass

import torch

__all__ = ["Membership"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of this process among those that train together."""

    device: torch.device
    """The device to train on: `cuda:1` for the second process of a host with GPUs, `xla` for all that torch_xla has,
    `cpu` where there is nothing else.
    """

    rank: int
    """The number of this process, from 0 on."""

    world_size: int
    """The number of processes."""

    local_rank: int
    """The number of this process on its host, from 0 on."""

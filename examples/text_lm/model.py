"""A byte-level transformer and how its tensors lie over a (data, model) mesh of devices."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_xla.distributed.spmd.xla_sharding import Mesh, mark_sharding
from typing_extensions import override

Spec = tuple[str | None, ...]

N_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    width: int
    window: int
    """Bytes that a prediction can look at."""

    layers: int = 2
    heads: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a two-layer network, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.hidden_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attend(self.attention_norm(x)))
        hidden = functional.gelu(self.hidden(self.hidden_norm(x)))
        x = x + self.dropout(self.hidden_out(hidden))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        query, key, value = (t.view(heads).transpose(1, 2) for t in self.query_key_value(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        future = torch.ones(length, length, device=x.device).triu(diagonal=1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.attention_out(mixed)
        return out


class TextModel(nn.Module):
    """Logits of the next byte at every position of a window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(N_BYTES, config.width)
        self.position_embedding = nn.Embedding(config.window, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, N_BYTES)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.byte_embedding(inputs) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# The end of a parameter's name → its axes' place on the mesh. "model" alone leaves a tensor replicated over
# "data"; what is not named here is replicated on every device.
_SPECS: dict[str, Spec] = {
    "byte_embedding.weight": ("data", "model"),
    "query_key_value.weight": ("model", None),
    "query_key_value.bias": ("model",),
    "attention_out.weight": (None, "model"),
    "hidden.weight": ("model", "data"),
    "hidden.bias": ("model",),
    "hidden_out.weight": ("data", "model"),
    "head.weight": ("model", None),
}


def parameter_specs(model: nn.Module) -> Iterator[tuple[nn.Parameter, Spec]]:
    """Return, for every parameter, one mesh axis or None per dimension."""
    for name, parameter in model.named_parameters():
        suffix = ".".join(name.split(".")[-2:])
        yield parameter, _SPECS.get(suffix, (None,) * parameter.dim())


def shard(tensor: Tensor, mesh: Mesh, spec: Spec) -> None:
    """Shard `tensor` over the mesh by `spec`. Everything is marked, replicated tensors too.

    A tensor left unmarked gets whatever sharding the compiler finds best after the first step, so that a run
    resumed from a checkpoint would start with another program than the one it continues.
    """
    mark_sharding(tensor, mesh, spec)

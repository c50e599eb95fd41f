"""Stock torch loads what the torch-free half wrote: every dtype, every shape, shards over files, bytes values."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.storage import _dtype_to_storage_type_map, _new_dtypes

from stepkeeper.checkpoint.dcp_format.dtypes import DTYPES
from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder, ValueOrder
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.storage.posix import PosixStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental"),
]

HERE = [name for name in DTYPES if hasattr(torch, name)]
"""What this torch has of them."""


def raw_bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    tensor = torch.empty(shape, dtype=dtype)
    n_bytes = tensor.numel() * tensor.element_size()
    values = torch.arange(n_bytes, dtype=torch.int64).remainder(2 if name == "bool" else 113)
    return values.to(torch.uint8).view(dtype).reshape(shape) if n_bytes else tensor


@dataclass
class Rank:
    data: bytearray = field(default_factory=bytearray)
    tensors: list[TensorOrder] = field(default_factory=list)
    values: list[ValueOrder] = field(default_factory=list)

    def add(self, fqn: str, tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        order = TensorOrder(
            fqn=fqn,
            dtype=dtype,
            global_shape=shape,
            offsets=offsets,
            sizes=tuple(tensor.shape),
            start=len(self.data),
        )
        self.tensors.append(order)
        self.data += raw_bytes(tensor)

    def add_value(self, fqn: str, value: object) -> None:
        blob = io.BytesIO()
        torch.save(value, blob)
        self.values.append(ValueOrder(fqn=fqn, start=len(self.data), length_bytes=len(blob.getvalue())))
        self.data += blob.getvalue()


def write(
    root: Path,
    ranks: list[Rank],
    aliases: Mapping[str, str] | None = None,
) -> Path:
    store = PosixStore(root)
    manifests = []
    for number, rank in enumerate(ranks):
        order = SaveOrder(
            rank=number,
            world_size=len(ranks),
            step=1,
            claim=0,
            nonce="ab" * 16,
            structure=Structure(tensors=tuple(rank.tensors), aliases=aliases or {}),
            values=tuple(rank.values),
        )
        manifests.append(write_checkpoint(store, order, memoryview(rank.data)))
    others = [manifest.make_ref() for manifest in manifests[1:]]
    finish_checkpoint(store, manifests[0], others)
    return root / manifests[0].folder


def test_no_dtype_that_torch_saves_is_forgotten() -> None:
    saved = {str(dtype).removeprefix("torch.") for dtype in _new_dtypes() | set(_dtype_to_storage_type_map())}
    # Quantized tensors and packed bits have no boxes of plain elements.
    plain = {name for name in saved if not name.startswith(("qint", "quint", "bits"))}
    assert plain == set(HERE)


@pytest.mark.smoke
def test_stock_dcp_loads_shards_of_every_dtype_and_values(tmp_path: Path) -> None:
    ranks = [Rank(), Rank()]
    # torch can't copy 4-bit floats, so its loader can't place them.
    expected = {name: filled(name, (4, 6)) for name in HERE if name != "float4_e2m1fn_x2"}
    for name, tensor in expected.items():
        ranks[0].add(name, tensor[:1], (4, 6), (0, 0))
        ranks[1].add(name, tensor[1:, 4:], (4, 6), (1, 4))
        ranks[0].add(name, tensor[1:, :4], (4, 6), (1, 0))
    expected |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "large": torch.randn(2500, 2000)}
    ranks[1].add("scalar", expected["scalar"], (), ())
    ranks[0].add("empty", expected["empty"], (0, 3), (0, 0))
    ranks[1].add("large", expected["large"], (2500, 2000), (0, 0))
    ranks[0].add_value("lr", {"step": 3})
    ranks[1].add_value("loader.1", [1, 2])
    folder = write(tmp_path, ranks, aliases={"tied": "large"})

    state: dict[str, object] = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    state |= {"lr": None, "loader.1": None, "tied": torch.zeros(2500, 2000)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert state["lr"] == {"step": 3}
    assert state["loader.1"] == [1, 2]
    for name, tensor in (expected | {"tied": expected["large"]}).items():
        loaded = state[name]
        assert isinstance(loaded, torch.Tensor)
        assert (loaded.shape, loaded.dtype) == (tensor.shape, tensor.dtype), name
        assert raw_bytes(loaded) == raw_bytes(tensor), name

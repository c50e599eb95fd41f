"""Bytes changed anywhere: read as something harmless, or refused with the one error that names the file or key."""

import io
import pickle
import zipfile
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from hostile_bytes.changes import Changes, changed, changes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import scaled
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stepkeeper.checkpoint.dcp_format.metadata import encode_metadata
from stepkeeper_planners.errors import MetadataDecodeError, ValueDecodeError
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.state.values import decode_value, encode_value

CHUNKS = [ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 3))) for start in (0, 2)]
SAMPLE = Metadata(
    {
        "w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((4, 3)), CHUNKS),
        "step": BytesStorageMetadata(),
    },
    planner_data={"w": ("w",)},
    storage_data={MetadataIndex("w", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 9) for chunk in CHUNKS},
)
VALUE = {
    "a": (1, "x", b"y", 2.5, 1j),
    "n": np.arange(3, dtype="i2"),
    "s": np.float32(1),
    "t": (torch.ones(2),),
}
OPCODES = [
    value
    for name, value in vars(pickle).items()
    if name.isupper() and type(value) is bytes and len(value) == 1
]
CHANGES = changes(OPCODES)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=scaled(300))
@given(CHANGES, st.integers(2, 5))
def test_metadata_changed_anywhere(chosen: Changes, protocol: int) -> None:
    with suppress(MetadataDecodeError):
        metadata = read_metadata(changed(pickle.dumps(SAMPLE, protocol), chosen), name="m")
        assert type(metadata) is Metadata
        check_metadata(metadata, name="m")


@settings(deadline=None, max_examples=scaled(300))
@given(CHANGES)
def test_a_value_changed_anywhere(chosen: Changes) -> None:
    with suppress(ValueDecodeError):
        encode_value("k", decode_value("k", changed(encode_value("k", VALUE), chosen)))


@settings(deadline=None, max_examples=scaled(300))
@given(CHANGES)
def test_the_pickle_in_a_value_changed_anywhere(chosen: Changes) -> None:
    """The archive's checksums are right: what is wrong is for the unpickler to find."""
    source = zipfile.ZipFile(io.BytesIO(encode_value("k", VALUE)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            target.writestr(
                entry.filename, changed(content, chosen) if "data.pkl" in entry.filename else content
            )
    with suppress(ValueDecodeError):
        value: Any = decode_value("k", buffer.getvalue())
        encode_value("k", value)


def test_the_bytes_before_any_change_are_read() -> None:
    assert read_metadata(pickle.dumps(SAMPLE), name="m") == SAMPLE
    assert decode_value("k", encode_value("k", VALUE)) is not None
    assert read_metadata(encode_metadata([]), name="m") == Metadata({}, None, {}, None, "1.0.0")

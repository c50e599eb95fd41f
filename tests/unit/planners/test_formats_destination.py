"""A result is there whole or not at all, even where the disk is full."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stepkeeper_planners import formats
from stepkeeper_planners.errors import DestinationExistsError

SIZE_BYTES = 4 << 20


@contextmanager
def room_for(n_bytes: int) -> Iterator[None]:
    """No file of this process can get larger: writing more fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    tensor = torch.arange(SIZE_BYTES // 8)
    torch.save({"a": tensor}, tmp_path / "a.pt")
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    formats.torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    return {
        "torch": tmp_path / "a.pt",
        "safetensors": tmp_path / "a.safetensors",
        "checkpoint": tmp_path / "a",
    }


@pytest.mark.parametrize(
    ("convert", "source", "dst"),
    [
        (formats.torch_save_to_checkpoint, "torch", "b"),
        (formats.checkpoint_to_torch_save, "checkpoint", "b.pt"),
        (formats.safetensors_to_checkpoint, "safetensors", "b"),
        (formats.checkpoint_to_safetensors, "checkpoint", "b"),
        (formats.checkpoint_to_safetensors, "checkpoint", "b.safetensors"),
    ],
)
def test_a_full_disk_leaves_nothing_behind(
    convert: Callable[..., formats.Conversion],
    source: str,
    dst: str,
    sources: dict[str, Path],
    tmp_path: Path,
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with room_for(SIZE_BYTES // 2), pytest.raises(OSError, match="too large"):
        convert(sources[source], tmp_path / dst)
    assert sorted(tmp_path.rglob("*")) == before
    convert(sources[source], tmp_path / dst)
    with room_for(SIZE_BYTES // 2), pytest.raises(OSError, match="too large"):
        convert(sources[source], tmp_path / dst, overwrite=True)
    assert (tmp_path / dst).exists(), "what was there stays"
    with pytest.raises(DestinationExistsError, match="overwrite=True"):
        convert(sources[source], tmp_path / dst)
    convert(sources[source], tmp_path / dst, overwrite=True)
    assert not list(tmp_path.glob(".*"))


def test_whoever_asks_to_be_told_may_stop_it(sources: dict[str, Path], tmp_path: Path) -> None:
    def stop(_: int, __: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    for convert, source in (
        (formats.torch_save_to_checkpoint, "torch"),
        (formats.checkpoint_to_torch_save, "checkpoint"),
        (formats.checkpoint_to_safetensors, "checkpoint"),
    ):
        with pytest.raises(KeyboardInterrupt):
            convert(sources[source], tmp_path / "b", progress=stop)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("also", ["notes.txt", "another_run/data.distcp"])
def test_a_checkpoint_with_other_things_beside_it_is_never_replaced(
    also: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    other = sources["checkpoint"] / also
    other.parent.mkdir(exist_ok=True)
    other.write_text("a year of work", encoding="ascii")
    for convert, source in (
        (formats.torch_save_to_checkpoint, "torch"),
        (formats.safetensors_to_checkpoint, "safetensors"),
    ):
        with pytest.raises(DestinationExistsError, match="delete it yourself"):
            convert(sources[source], sources["checkpoint"], overwrite=True)
    assert other.read_text(encoding="ascii") == "a year of work"


def test_a_source_never_is_what_is_replaced(sources: dict[str, Path], tmp_path: Path) -> None:
    inside = sources["torch"].rename(sources["checkpoint"] / "named like a part.distcp")
    with pytest.raises(DestinationExistsError, match=r"part\.distcp, which is the source, is in"):
        formats.torch_save_to_checkpoint(inside, sources["checkpoint"], overwrite=True)
    (tmp_path / "link").symlink_to(sources["checkpoint"], target_is_directory=True)
    for folder in (sources["checkpoint"], tmp_path / "link"):
        with pytest.raises(DestinationExistsError, match=r"metadata is part of"):
            formats.checkpoint_to_torch_save(sources["checkpoint"], folder / ".metadata", overwrite=True)
    files = tmp_path / "files"
    formats.checkpoint_to_safetensors(sources["checkpoint"], files)
    (files / "x.safetensors").mkdir()
    with pytest.raises(DestinationExistsError, match="delete it yourself"):
        formats.checkpoint_to_safetensors(sources["checkpoint"], files, overwrite=True)

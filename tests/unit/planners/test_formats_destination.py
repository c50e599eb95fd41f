"""A result is there whole or not at all, even where the disk is full or the process is killed."""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stepkeeper_planners import formats
from stepkeeper_planners.errors import DestinationExistsError
from stepkeeper_planners.formats import destination

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


OLD = {"model-00001-of-00002.safetensors": b"old 1", "model-00002-of-00002.safetensors": b"old 2"}
NEW = {"model.safetensors": b"new"}


def make(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def content(folder: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


def replace_folder(folder: Path) -> None:
    with destination.new_folder(
        folder / "dst", source=None, overwrite=True, replaceable=lambda path: path.suffix == ".safetensors"
    ) as new:
        make(new, NEW)


def replace_file(folder: Path) -> None:
    with destination.new_file(folder / "dst.pt", source=None, overwrite=True) as file:
        file.write(b"new")


def ended(act: Callable[[], None], before_step: int, folder: Path) -> int:
    """Do that in a fork that is killed before it takes this step in the folder, and return how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    steps = 0

    def count(_: str, arguments: tuple[object, ...]) -> None:
        nonlocal steps
        if not any(str(folder) in str(argument) for argument in arguments):
            return
        steps += 1
        if steps == before_step:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(count)
        act()
        code = 0
    except BaseException:  # a fork must never get back into pytest
        traceback.print_exc()
    finally:
        os._exit(code)


def killed_everywhere(
    act: Callable[[Path], None], make_old: Callable[[Path], None], tmp_path: Path
) -> list[Path]:
    """Return what each kill leaves: one folder for each step, and for the end."""
    left: list[Path] = []
    code: int = -signal.SIGKILL
    while code == -signal.SIGKILL:
        folder = tmp_path / f"{len(left)}"
        folder.mkdir()
        make_old(folder)
        left.append(folder)
        code = ended(lambda at=folder: act(at), len(left), folder)  # type: ignore[misc]  # bound in this turn
    assert code == 0
    return left


def test_a_folder_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    left = killed_everywhere(replace_folder, lambda at: make(at / "dst", OLD), tmp_path)
    found = [content(folder / "dst") for folder in left]
    n_old = found.index(None)
    assert n_old > 3
    assert found == [OLD] * n_old + [None] + [NEW] * (len(found) - n_old - 1)
    beside = {path.suffix: content(path) for path in left[n_old].iterdir()}
    assert beside == {".replaced": OLD, ".partial": NEW}
    for folder in left:
        replace_folder(folder)
        assert content(folder / "dst") == NEW
    assert [path.name for path in left[-1].iterdir()] == ["dst"]


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    def make_old(folder: Path) -> None:
        (folder / "dst.pt").write_bytes(b"old")

    left = killed_everywhere(replace_file, make_old, tmp_path)
    found = [(folder / "dst.pt").read_bytes() for folder in left]
    assert found == sorted(found, reverse=True)
    assert set(found) == {b"old", b"new"}

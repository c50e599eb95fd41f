"""A process that is killed while it replaces a result leaves the old one or the new one, whole."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper_planners.formats import destination

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
    assert all(files in (OLD, NEW) for files in found)
    n_old = found.index(NEW)
    assert 3 < n_old < len(found) - 1
    assert OLD not in found[n_old:]
    for folder in left:
        replace_folder(folder)
        assert content(folder / "dst") == NEW
    assert [path.name for path in left[-1].iterdir()] == ["dst"]


def test_where_names_cant_be_exchanged_both_are_whole_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "exchange_paths", lambda one, other: False)
    left = killed_everywhere(replace_folder, lambda at: make(at / "dst", OLD), tmp_path)
    (folder,) = [folder for folder in left if content(folder / "dst") not in (OLD, NEW)]
    beside = {path.suffix: content(path) for path in folder.iterdir()}
    assert beside == {".replaced": OLD, ".partial": NEW}


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    def make_old(folder: Path) -> None:
        (folder / "dst.pt").write_bytes(b"old")

    left = killed_everywhere(replace_file, make_old, tmp_path)
    found = [(folder / "dst.pt").read_bytes() for folder in left]
    assert found == sorted(found, reverse=True)
    assert set(found) == {b"old", b"new"}


def test_an_exchange_with_nothing_names_the_file(tmp_path: Path) -> None:
    make(tmp_path / "a", OLD)
    with pytest.raises(FileNotFoundError) as caught:
        destination.exchange_paths(tmp_path / "a", tmp_path / "b")
    assert caught.value.filename == str(tmp_path / "a")


def test_the_longest_names_are_replaced_too(tmp_path: Path) -> None:
    for name in ("x" * 255, "ü" * 127):
        for _ in range(2):
            with destination.new_file(tmp_path / name, source=None, overwrite=True) as file:
                file.write(b"new")
        assert (tmp_path / name).read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 2

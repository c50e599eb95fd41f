"""A file system that remembers what was synced: what a power cut may leave of it, after any of its operations."""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, final
from unittest import mock

_Chooses = Callable[[str, bool], bool]
"""Given a path, and whether it is data: does what wasn't synced survive?"""

RANDOM_CUTS: Final = 2


class Op(NamedTuple):
    """An operation on the file system; paths are relative to the disk."""

    kind: str
    """mkdir, create, write, fsync, link, rename, unlink or rmdir."""

    path: str
    data: bytes = b""
    target: str = ""


class Answered(NamedTuple):
    """A process was told that this object is there, or that it is not."""

    path: str
    data: bytes | None


class Killed(BaseException):
    """The process is no more: whatever it still tries comes to nothing."""


@final
class Recorder:
    """Records what happens to files under a folder. Nothing is really synced meanwhile."""

    def __init__(self, disk: Path) -> None:
        self.ops: list[Op | Answered] = []
        self.kills: Callable[[Op], bool] = lambda op: False
        """Is the process killed after this?"""

        self._disk = disk
        self._open: dict[int, str] = {}
        self._lock = Lock()
        self._dead = False

    def revive(self) -> None:
        """Begin another process: what comes now is its own."""
        self.kills = lambda op: False
        self._dead = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        with mock.patch.multiple(
            os,
            open=self._recorded_open(os.open),
            close=self._recorded_close(os.close),
            writev=self._recorded_writev(os.writev),
            fsync=self._fsync,
            link=self._recorded_move("link", os.link),
            unlink=self._recorded("unlink", os.unlink),
            mkdir=self._recorded("mkdir", os.mkdir),
            rmdir=self._recorded("rmdir", os.rmdir),
        ):
            yield

    def note(self, op: Op | Answered) -> None:
        with self._lock:
            self.ops.append(op)
            if isinstance(op, Op) and self.kills(op):
                self._dead = True
                raise Killed

    def renaming(self, call: Callable[[Path, Path], bool]) -> Callable[[Path, Path], bool]:
        """`call`, which renames without replacing, recorded."""
        return self._recorded_move("rename", call)

    def _check_alive(self) -> None:
        if self._dead:
            raise Killed

    def _relative(self, path: Any) -> str | None:
        absolute = Path(os.fsdecode(path))
        if not absolute.is_relative_to(self._disk):
            return None
        return "" if absolute == self._disk else str(absolute.relative_to(self._disk))

    def _recorded(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(path: Any, *arguments: Any, **options: Any) -> Any:
            self._check_alive()
            answer = call(path, *arguments, **options)
            relative = self._relative(path)
            if relative is not None:
                self.note(Op(kind, relative))
            return answer

        return recorded

    def _recorded_move(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(source: Any, target: Any) -> Any:
            self._check_alive()
            answer = call(source, target)
            old, new = self._relative(source), self._relative(target)
            assert old is not None
            assert new is not None
            if answer is not False:
                self.note(Op(kind, old, target=new))
            return answer

        return recorded

    def _recorded_open(self, call: Callable[..., int]) -> Callable[..., int]:
        def recorded(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            self._check_alive()
            descriptor = call(path, flags, *arguments, **options)
            relative = self._relative(path)
            if relative is not None:
                self._open[descriptor] = relative
                if flags & os.O_CREAT:
                    self.note(Op("create", relative))
            return descriptor

        return recorded

    def _recorded_close(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(descriptor: int) -> None:
            self._open.pop(descriptor, None)
            call(descriptor)

        return recorded

    def _recorded_writev(self, call: Callable[..., int]) -> Callable[..., int]:
        def recorded(descriptor: int, parts: Sequence[Any]) -> int:
            self._check_alive()
            written = call(descriptor, parts)
            self.note(Op("write", self._open[descriptor], b"".join(bytes(p) for p in parts)[:written]))
            return written

        return recorded

    def _fsync(self, descriptor: int) -> None:
        self._check_alive()
        # Files that are opened for reading come through io, not through os.open.
        path = self._open.get(descriptor) or self._relative(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path is not None:
            self.note(Op("fsync", path))


@dataclass(slots=True, eq=False)
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(slots=True, eq=False)
class _Folder:
    entries: dict[str, "_File | _Folder"] = field(default_factory=dict)
    synced: dict[str, "_File | _Folder"] = field(default_factory=dict)


def _only(folder: str, path: str, data: bool) -> bool:
    return not data and path == folder


def _but(folder: str, path: str, data: bool) -> bool:
    return not data and path != folder


Contents = dict[str, bytes | None]
"""By path, a file's bytes; None: a folder."""


@final
class Disk:
    """Files and folders as processes see them, and as they would be found after a power cut."""

    def __init__(self) -> None:
        self._root = _Folder()

    def apply(self, op: Op) -> None:
        parent, _, name = op.path.rpartition("/")
        match op.kind:
            case "mkdir":
                self._folder(parent).entries[name] = _Folder()
            case "create":
                self._folder(parent).entries[name] = _File()
            case "write":
                self._file(op.path).data += op.data
            case "link":
                above, _, target = op.target.rpartition("/")
                self._folder(above).entries[target] = self._file(op.path)
            case "rename":
                above, _, target = op.target.rpartition("/")
                self._folder(above).entries[target] = self._folder(parent).entries.pop(name)
            case "unlink" | "rmdir":
                del self._folder(parent).entries[name]
            case "fsync":
                node = self._at(op.path)
                if isinstance(node, _File):
                    node.synced = node.data
                else:
                    node.synced = dict(node.entries)
            case _:
                raise AssertionError(op)

    def cuts(self, seed: int) -> Iterator[tuple[str, Contents]]:
        """Yield what may be left, each once: the extremes, each folder ahead of others or behind, some at random."""
        waiting = sorted(self._unsynced_folders())
        chance = random.Random(seed)
        chosen: dict[str, _Chooses] = {
            "nothing unsynced": lambda path, data: False,
            "entries, but no data": lambda path, data: not data,
            "data, but no entries": lambda path, data: data,
            "all": lambda path, data: True,
        }
        for folder in waiting:
            chosen[f"entries of {folder!r} only"] = partial(_only, folder)
            chosen[f"entries but those of {folder!r}"] = partial(_but, folder)
        for number in range(RANDOM_CUTS):
            chosen[f"at random {number} of seed {seed}"] = lambda path, data: chance.random() < 0.5
        seen: set[frozenset[tuple[str, bytes | None]]] = set()
        for name, chooses in chosen.items():
            left = dict(self._left(self._root, "", chooses))
            key = frozenset(left.items())
            if key not in seen:
                seen.add(key)
                yield name, left

    def _left(self, folder: _Folder, path: str, chooses: _Chooses) -> Iterator[tuple[str, bytes | None]]:
        names = {**folder.synced, **folder.entries}
        for name in names:
            old, new = folder.synced.get(name), folder.entries.get(name)
            node = old if old is new or not chooses(path, False) else new
            inner = f"{path}/{name}" if path else name
            if isinstance(node, _File):
                yield inner, node.data if node.data != node.synced and chooses(inner, True) else node.synced
            elif node is not None:
                yield inner, None
                yield from self._left(node, inner, chooses)

    def _unsynced_folders(self) -> set[str]:
        found: set[str] = set()
        stack: list[tuple[str, _Folder]] = [("", self._root)]
        while stack:
            path, folder = stack.pop()
            if folder.entries != folder.synced:
                found.add(path)
            for name, node in {**folder.synced, **folder.entries}.items():
                if isinstance(node, _Folder):
                    stack.append((f"{path}/{name}" if path else name, node))
        return found

    def _at(self, path: str) -> "_File | _Folder":
        node: _File | _Folder = self._root
        for name in path.split("/") if path else []:
            assert isinstance(node, _Folder)
            node = node.entries[name]
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._at(path)
        assert isinstance(node, _Folder)
        return node

    def _file(self, path: str) -> _File:
        node = self._at(path)
        assert isinstance(node, _File)
        return node


def write_out(contents: Contents, folder: Path) -> None:
    """The folder holds these, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, data in contents.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)

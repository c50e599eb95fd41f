"""Name a hang by the stacks of all ranks: what each rank does, and which ranks the others wait for. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["NamedHang", "RankStacks", "Source", "find_main_frame", "list_ranks", "name_hang"]


class Source(StrEnum):
    """The way in which the stacks of a trainer were read."""

    PYTHON = "python"
    """A thread of the trainer wrote them."""

    SIGNAL = "signal"
    """A signal handler in C wrote them, because no thread of Python answered."""

    NONE = "none"
    """They can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """The stacks of one rank's threads, and the state of its process."""

    text: str
    """As faulthandler writes them: the main thread last, and of each thread the innermost frame first."""

    source: Source = Source.PYTHON
    state: str = ""
    """The kernel's letter for the state of the main thread, as in /proc/PID/stat; empty if it is unknown."""

    line: str = ""
    """The source code of the main thread's innermost line; empty if it can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHang:
    kind: str
    ranks: tuple[int, ...]
    """The ranks that the others wait for; all ranks if none stands out."""

    text: str


class _Frame(NamedTuple):
    file: str
    line: int
    function: str


class _Place(NamedTuple):
    kind: str
    does: str
    """What a rank there does, as a verb phrase."""


_STOPPED: Final = _Place("Stopped", "stopped by a signal (SIGSTOP) or a debugger")
_GIL: Final = _Place("GilHeld", "in C code that holds Python's lock")
_SILENT: Final = _Place("NoAnswer", "without an answer: the host, or its companion, doesn't run")
_UNREAD: Final = _Place("Unreadable", "without an answer, and its stacks can't be read")
_KERNEL: Final = _Place("Kernel", "waiting in the kernel, for a disk or a device")
_DATA: Final = _Place("DataLoader", "waiting for data")
_CODE: Final = _Place("Code", "running Python code")
_STORE: Final = _Place("Store", "waiting for a key in the store of the process group")
_MANAGER: Final = _Place("Manager", "waiting in a call of the checkpoint manager")
_COLLECTIVE: Final = _Place("Collective", "waiting in a collective, or for its device")
_BLAMED: Final = (_STOPPED, _SILENT, _KERNEL, _GIL, _UNREAD, _DATA, _CODE)
"""Places whose ranks the others wait for. The first one that a rank is in names the hang."""

_NOT_IN_COLLECTIVE: Final = "NotInCollective"
_MAX_TEXT: Final = 1000
_MAX_GROUPS: Final = 4

_THREAD: Final = re.compile(r"^(Current thread|Thread) .*\(most recent call first\):")
_FRAME: Final = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$')
_TORCH: Final = r"-packages/torch/|/torch/(?=_|(autograd|cuda|distributed|nn|optim|utils)/)"
"""torch's files, wherever it is installed, and no /home/me/torch/train.py."""

_OURS: Final = rf"(-packages/stepkeeper|{re.escape(str(Path(__file__).parents[1]))})/"
_LIBRARY: Final = re.compile(
    rf"{_TORCH}|/(torch_xla|stepkeeper_planners)/|{_OURS}|/python3[.\d]*/(?!(site|dist)-packages/)|^<"
)
"""Files whose frames, if they are innermost, only show what the code that called them waits for."""

_DATA_FILES: Final = re.compile(r"/torch/utils/data/")
_STORE_FRAMES: Final = re.compile(r"/torch/distributed/.* (.*store.*|.*rendezvous.*)$")
_DEVICE_FILES: Final = re.compile(r"/(torch/(distributed|autograd|cuda|nn/parallel)|torch_xla)/")
_MANAGER_FILES: Final = re.compile(_OURS)
_STORE_CALL: Final = re.compile(r"store\w*\.(get|wait|set|add|compare_set|multi_get)\(")
_DEVICE_CALL: Final = re.compile(r"\.(item|cpu|tolist|synchronize)\(|\b(work|handle|req)\w*\.wait\(")


def name_hang(stacks: Mapping[int, RankStacks], missing: Iterable[int] = ()) -> NamedHang:
    """Name the hang of ranks with these stacks. `missing` are those that sent none.

    A rank that is stopped, holds Python's lock, waits for data or runs code of its own keeps the others waiting. If all
    ranks wait for others, those at the rarest place are named, as one that took another branch.
    """
    groups: dict[tuple[_Place, str], list[int]] = {}
    for rank in sorted({*stacks, *missing}):
        own = stacks.get(rank)
        groups.setdefault((_SILENT, "") if own is None else _find_place(own), []).append(rank)
    n_ranks = sum(map(len, groups.values()))
    own_places = [place for place in _BLAMED if any(place == key[0] for key in groups)]
    if own_places:
        blamed = {key for key in groups if key[0] == own_places[0]}
        others_wait = any(place not in _BLAMED for place, _ in groups)
        kind = _NOT_IN_COLLECTIVE if own_places[0] == _CODE and others_wait else own_places[0].kind
    else:
        rarest = min(groups, key=lambda key: len(groups[key]), default=(_CODE, ""))
        is_rare = len(groups) > 1 and 2 * len(groups[rarest]) < n_ranks
        blamed = {rarest} if is_rare else set(groups)
        places = {place for place, _ in groups}
        kind = _NOT_IN_COLLECTIVE if len(groups) > 1 else next(iter(places), _CODE).kind
    ranks = tuple(sorted(rank for key in blamed for rank in groups[key]))
    order = sorted(groups, key=lambda key: (key not in blamed, groups[key][0]))
    parts = [_describe(groups[key], *key) for key in order[:_MAX_GROUPS]]
    if len(order) > _MAX_GROUPS:
        parts.append(f"ranks at other places: {sum(len(groups[key]) for key in order[_MAX_GROUPS:])}")
    return NamedHang(kind=kind, ranks=ranks, text="; ".join(parts)[:_MAX_TEXT])


def _describe(ranks: list[int], place: _Place, site: str) -> str:
    subject = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list_ranks(ranks)} are"
    return f"{subject} {place.does}{site and f' at {site}'}"


def list_ranks(ranks: Iterable[int]) -> str:
    """List ranks as a short text: "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _find_place(rank: RankStacks) -> tuple[_Place, str]:
    """Find what the rank does, and the innermost line of its own code, as text."""
    frames = _main_frames(rank.text)
    n_inner = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(frame.file)), len(frames))
    own = frames[n_inner] if n_inner < len(frames) else next(iter(frames), None)
    code = f": {rank.line}" if rank.line and n_inner == 0 else ""
    site = "" if own is None else f"{own.file}:{own.line} in {own.function}{code}"
    return _find_kind(rank, frames, frames[:n_inner]), site


def _find_kind(rank: RankStacks, frames: list[_Frame], inner: list[_Frame]) -> _Place:
    """Find what the rank does. The first rule that holds decides."""
    files = [frame.file for frame in inner]
    in_store = any(_STORE_FRAMES.search(f"{frame.file} {frame.function}") for frame in inner[:2])
    holds_lock = rank.source is Source.SIGNAL
    rules = (
        (rank.state in {"T", "t"}, _STOPPED),
        # A data set without workers runs in the main thread, below the data loader.
        (any(_DATA_FILES.search(frame.file) for frame in frames), _GIL if holds_lock else _DATA),
        (in_store or _STORE_CALL.search(rank.line), _STORE),
        # Also with Python's lock, which some collectives hold.
        (any(map(_DEVICE_FILES.search, files)), _COLLECTIVE),
        (holds_lock, _GIL),
        (any(map(_MANAGER_FILES.search, files)), _MANAGER),
        (not inner and _DEVICE_CALL.search(rank.line), _COLLECTIVE),
        (rank.state == "D", _KERNEL),
        (rank.source is Source.NONE, _UNREAD),
        (True, _CODE),
    )
    return next(place for holds, place in rules if holds)


def find_main_frame(text: str) -> tuple[str, int] | None:
    """Find file and line of the main thread's innermost frame."""
    return next(((frame.file, frame.line) for frame in _main_frames(text)), None)


def _main_frames(text: str) -> list[_Frame]:
    """Read the frames of the last thread in the text, which is the main one, the innermost first."""
    frames: list[_Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(_Frame(found[1], int(found[2]), found[3]))
    return frames

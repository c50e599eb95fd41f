"""Read a root's bytes by the specification, without the log's code; check what processes were told against that."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import google_crc32c

from stepkeeper.log.tail import slot_of
from stepkeeper.retention.leases import LEASE_ENTRIES

LOG = ".stepkeeper/log/"


class ViolationError(AssertionError):
    """An invariant doesn't hold."""


@dataclass(frozen=True)
class Reading:
    """The log's meaning."""

    commits: Mapping[str, int]
    """By folder, all that were ever committed, whatever became of them."""

    bodies: Mapping[int, Mapping[str, Any]]
    """By slot, all commit entries."""

    live: Mapping[int, Mapping[str, Any]]
    """By slot, those that are not deleted; quarantined ones are kept."""

    head: int | None

    begins: Mapping[int, int | None]
    """By slot, what HEAD was before."""

    claims: Mapping[int, int]
    """By commit, its claim."""

    deletions: tuple[tuple[int, int, int], ...]
    """The slot of each deletion, its claim, and a commit that it deleted."""


def read_log(objects: Mapping[str, bytes]) -> Reading:
    """Raises ViolationError if an entry isn't allowed after those before it."""
    log = {path: data for path, data in objects.items() if path.startswith(LOG)}
    paths = sorted(log)
    if paths != [f"{LOG}{slot:08d}.json" for slot in range(len(paths))]:
        raise ViolationError(f"the log has gaps: {paths}")
    return _read_entries(tuple(log[path] for path in paths))


def check_data(objects: Mapping[str, bytes], commit: Mapping[str, Any]) -> None:
    """Raises ViolationError if not all of the commit's objects are there, with their bytes."""
    folder, ref = commit["folder"], commit["manifest"]
    manifest = objects.get(f"{folder}/{ref['path']}")
    if manifest is None or google_crc32c.value(manifest) != ref["crc32c"]:
        raise ViolationError(f"{folder} is to be there, but its manifest is gone or other")
    for each in _decoded(manifest)["objects"]:
        data = objects.get(f"{folder}/{each['path']}")
        if data is None or [google_crc32c.value(data)] != each["blocks"]:
            raise ViolationError(f"{folder} is to be there, but {each['path']} is gone or other")


def _check_forgetful(reading: Reading, claim: int, own: Collection[int]) -> None:
    """Raises ViolationError if a process that restored nothing continues from HEAD with a step that HEAD has passed.

    `claim` is its first claim, `own` are all of them. Nor may it have deleted what HEAD was because of such steps.
    """
    found = reading.begins[claim]
    if found is None:
        return
    step_of = {slot: body["step"] for slot, body in reading.bodies.items()}
    mine = {slot for slot, by in reading.claims.items() if by in own}
    for slot in mine:
        oldest: int | None = slot
        while oldest in mine:
            oldest = reading.bodies[oldest].get("parent")
        if oldest is not None and step_of[slot] <= step_of[found]:
            raise ViolationError(
                f"commit {slot}, of a process that restored nothing, continues from {oldest}"
            )
    for slot, by, gone in reading.deletions:
        if by not in own or gone in mine:
            continue
        come_to = max((step_of[each] for each in mine if each < slot), default=-1)
        if come_to <= step_of[found] and come_to < step_of[gone]:
            raise ViolationError(f"slot {slot} deletes {gone}, which was neither restored nor passed")


def check_told(reading: Reading, objects: Mapping[str, bytes], notes: Sequence[tuple[Any, ...]]) -> None:
    """Check that what a process was told is so, and that what it holds is there, whether it lives or not."""
    held: tuple[str, int] | None = None
    for note in notes:
        match note:
            case ("committed", folder, slot) if reading.commits.get(folder) != slot:
                raise ViolationError(f"{folder} was said to be committed at slot {slot}, and isn't")
            case ("refused" | "voided", folder) if folder in reading.commits:
                raise ViolationError(f"{folder} was {note[0]}, and is committed")
            case ("followed", before, after) if any(before < begin < after for begin in reading.begins):
                raise ViolationError(f"claim {before} was followed by {after}, though another was between")
            case ("forgot", claim):
                _check_forgetful(reading, claim, {each[1].slot for each in notes if each[0] == "claimed"})
            case ("held", folder, seen):
                held = folder, seen
            case ("let-go",):
                held = None
            case _:
                continue
    # A lease may be over once so many entries came after its holder read the log.
    if held is not None and max(slot_of(path) or 0 for path in objects) < held[1] + LEASE_ENTRIES:
        try:
            check_data(objects, reading.bodies[reading.commits[held[0]]])
        except ViolationError as violation:
            raise ViolationError(f"pinned: {violation}") from violation


@cache
def _decoded(data: bytes) -> Any:
    return json.loads(data)


@cache
def _read_entries(entries: tuple[bytes, ...]) -> Reading:
    root = _decoded(entries[0])["nonce"] if entries else ""
    return _Log(root).read([_decoded(entry) for entry in entries])


class _Log:
    def __init__(self, root: str) -> None:
        self.root = root
        self.claim: int | None = None
        self.by_hand = False
        """Is the claim a person's, who may remove what retention keeps?"""

        self.head: int | None = None
        self.branching = False
        """Does the next commit begin a branch?"""

        self.begins: dict[int, int | None] = {}
        self.claims: dict[int, int] = {}
        self.deletions: list[tuple[int, int, int]] = []
        self.commits: dict[str, int] = {}
        self.bodies: dict[int, Mapping[str, Any]] = {}
        self.parents: dict[int, int | None] = {}
        self.gone: set[int] = set()
        self.quarantined: set[int] = set()

    def read(self, entries: Sequence[Any]) -> Reading:
        for slot, entry in enumerate(entries):
            before = self.head
            getattr(self, entry["kind"])(slot, entry)
            if entry["claim"] != self.claim:
                raise ViolationError(
                    f"slot {slot}: the stale claim {entry['claim']} wrote after {self.claim}"
                )
            self.head = self.nearest(self.head)
            if entry["kind"] not in ("begin", "quarantine") and (self.head or -1) < (before or -1):
                raise ViolationError(
                    f"slot {slot}: a {entry['kind']} moved HEAD from {before} to {self.head}"
                )
            after = (self.root, self.claim, self.head)
            if (entry["after"]["root"], entry["after"]["claim"], entry["after"].get("head")) != after:
                raise ViolationError(f"slot {slot} says {entry['after']}; it is {after}")
        kept = (set(self.bodies) - self.gone) | self.quarantined
        live = {slot: body for slot, body in self.bodies.items() if slot in kept}
        return Reading(
            self.commits,
            self.bodies,
            live,
            self.head,
            self.begins,
            self.claims,
            tuple(self.deletions),
        )

    def begin(self, slot: int, entry: Any) -> None:
        self.begins[slot] = self.head
        self.claim, self.branching = slot, entry["begin"].get("branch", False)
        if not self.branching:
            self.head = entry["begin"].get("base")
        elif {"base", "legacy", "scratch"} & set(entry["begin"]):
            raise ViolationError(f"slot {slot} begins a branch, but also continues from a base")
        self.by_hand = entry["begin"]["host"].startswith("stepkeeper rm on ")
        if self.head in self.gone:
            raise ViolationError(f"slot {slot} continues from commit {self.head}, which is gone")

    def commit(self, slot: int, entry: Any) -> None:
        body = entry["commit"]
        parent = None if self.branching else self.head
        if body.get("parent") != parent:
            raise ViolationError(f"slot {slot} has parent {body.get('parent')}, but continues from {parent}")
        if body["folder"] in self.commits:
            raise ViolationError(f"slot {slot} commits {body['folder']} again")
        self.parents[slot], self.head = parent, slot
        self.branching = False
        assert self.claim is not None
        self.claims[slot] = self.claim
        self.commits[body["folder"]] = slot
        self.bodies[slot] = body

    def delete(self, slot: int, entry: Any) -> None:
        if self.branching:
            raise ViolationError(f"slot {slot} deletes, and its branch has no commit yet")
        line = self.line()
        passed = {each: self.bodies[each]["step"] for each in line}
        for each in entry["delete"]["commits"]:
            if self.by_hand and each in self.quarantined:
                self.quarantined.remove(each)
                continue
            if each in self.gone or each == self.head:
                raise ViolationError(f"slot {slot} deletes commit {each}, which is gone, or HEAD")
            step = self.bodies[each]["step"]
            is_passed = any(after > each and far >= step for after, far in passed.items())
            if each not in line and not is_passed and not self.by_hand:
                raise ViolationError(
                    f"slot {slot} deletes an abandoned commit that HEAD's line hasn't passed"
                )
            self.gone.add(each)
            assert self.claim is not None
            self.deletions.append((slot, self.claim, each))

    def quarantine(self, slot: int, entry: Any) -> None:
        self.gone.add(entry["quarantine"]["commit"])
        self.quarantined.add(entry["quarantine"]["commit"])

    def restored(self, slot: int, entry: Any) -> None:
        if entry["restored"]["commit"] in self.gone:
            raise ViolationError(f"slot {slot}: a commit was restored that is gone")

    def void(self, slot: int, entry: Any) -> None:
        if entry["void"]["folder"] in self.commits:
            raise ViolationError(f"slot {slot} voids {entry['void']['folder']}, which is committed")

    def line(self) -> list[int]:
        found, slot = [], self.head
        while slot is not None:
            found.append(slot)
            slot = self.nearest(self.parents[slot])
        return found

    def nearest(self, slot: int | None) -> int | None:
        while slot in self.gone:
            slot = self.parents[slot]
        return slot

"""Number each question, content and answer of the memory back end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from storage_explorer.replay import Op, Refused

from stepkeeper.errors import StepkeeperError
from stepkeeper_testing.memory import MemoryBucket, MemoryStore


@final
@dataclass
class Answers:
    """Number the answers that processes get: comparing numbers costs nothing."""

    values: list[Any] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        # True and 1 are equal, and are different answers.
        key = (type(value), value)
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.values)
            self.values.append(value)
        return found


@final
@dataclass
class Buckets:
    """Contents of the bucket, each with a number."""

    contents: list[Mapping[str, bytes]] = field(default_factory=list)
    numbers: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    after: dict[tuple[int, Op], tuple[int, int]] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)

    def number(self, objects: Mapping[str, bytes]) -> int:
        key = frozenset(objects.items())
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.contents)
            self.contents.append(dict(objects))
        return found

    def applied(self, bucket: int, op: Op) -> tuple[int, int]:
        """Return what is in the bucket once the memory back end has done `op`, and the number of its answer."""
        found = self.after.get((bucket, op))
        if found is None:
            store = MemoryStore(MemoryBucket())
            store.bucket.objects = dict(self.contents[bucket])
            # Time is whatever it may be: any number of seconds lies between two objects, so any entries span a lease.
            store.bucket.times_unix_s = dict.fromkeys(store.bucket.objects, 0.0)
            answer = self.answers.number(_ask(store, op))
            changed = op.kind in ("put", "write", "delete")
            found = (self.number(store.bucket.objects) if changed else bucket), answer
            self.after[bucket, op] = found
        return found


def _ask(store: MemoryStore, op: Op) -> Any:
    try:
        match op.kind:
            case "put":
                return store.put_if_absent(op.path, op.data)
            case "write":
                return store.write(op.path, [op.data])
            case "read":
                return store.read(op.path, op.first, op.second)
            case "list":
                return tuple(store.list(op.path))
            case "page":
                return tuple(store.list_page(op.path, op.data.decode(), op.first))
            case "delete":
                return store.delete(op.path)
            case kind:
                raise AssertionError(kind)
    except StepkeeperError as error:
        return Refused(type(error), str(error))

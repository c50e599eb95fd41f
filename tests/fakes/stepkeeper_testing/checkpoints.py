"""Make small committed checkpoints without torch and without a companion process."""

import re
import secrets
import struct
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder, ValueOrder
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.companion.messages import WriteRequest
from stepkeeper.log import Claim, CommitRecord, ForeignBase, Log
from stepkeeper.log.entries import new_nonce
from stepkeeper.storage import Store, open_store
from stepkeeper_testing.pod import pod_identity

_VALUE = b"no value that anybody reads"


def save_small(
    log: Log,
    store: Store,
    claim: Claim,
    step: int,
    *,
    world_size: int = 1,
    value: bytes = _VALUE,
    metrics: dict[str, str] | None = None,
) -> CommitRecord:
    """Write and commit a small checkpoint of `step`.

    Rank r writes row r of the float32 tensor `model.w`, of shape (world_size, 8); rank 0 also writes the value
    `step`, as which `value` has the bytes that torch.save would have written.
    """
    own, *others = write_small(store, claim, step, world_size=world_size, value=value)
    finished = finish_checkpoint(store, own, [manifest.make_ref() for manifest in others])
    return log.commit(
        claim,
        step=step,
        folder=own.folder,
        size_bytes=finished.size_bytes,
        manifest=finished.manifest,
        metrics=metrics,
    )


def write_small(
    store: Store, claim: Claim, step: int, *, world_size: int = 1, value: bytes = _VALUE
) -> Sequence[Manifest]:
    """Write what `save_small` writes, without the commit: what a save that was given up leaves there.

    Returns the ranks' manifests, in order.
    """
    nonce = new_nonce()
    return [
        write_checkpoint(
            store, *small_order(step, claim.slot, nonce, rank=rank, world_size=world_size, value=value)
        )
        for rank in range(world_size)
    ]


def small_order(
    step: int, claim: int, nonce: str, *, rank: int, world_size: int, value: bytes = _VALUE
) -> tuple[SaveOrder, memoryview]:
    """Make what a rank is asked to write of a small checkpoint, and the data."""
    row = struct.pack("<8f", *(step + rank + column for column in range(8)))
    tensor = tensor_order("model.w", (world_size, 8), offsets=(rank, 0), sizes=(1, 8))
    values = [ValueOrder(fqn="step", start=len(row), length_bytes=len(value))] if rank == 0 else []
    order = save_order(
        [tensor], values, rank=rank, world_size=world_size, step=step, claim=claim, nonce=nonce
    )
    return order, memoryview(bytearray(row + value))


def tensor_order(
    fqn: str,
    shape: tuple[int, ...],
    *,
    offsets: tuple[int, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    start: int = 0,
    dtype: str = "float32",
) -> TensorOrder:
    """Make the order of a part of a tensor, by default all of it."""
    offsets, sizes = offsets or (0,) * len(shape), shape if sizes is None else sizes
    return TensorOrder(fqn=fqn, dtype=dtype, global_shape=shape, offsets=offsets, sizes=sizes, start=start)


def save_order(
    tensors: Sequence[TensorOrder],
    values: Sequence[ValueOrder] = (),
    *,
    rank: int,
    world_size: int,
    step: int = 1,
    claim: int = 0,
    nonce: str = "ab" * 16,
    aliases: dict[str, str] | None = None,
) -> SaveOrder:
    return SaveOrder(
        rank=rank,
        world_size=world_size,
        step=step,
        claim=claim,
        nonce=nonce,
        structure=Structure(tensors=tuple(tensors), aliases=aliases or {}),
        values=tuple(values),
    )


def write_request(order: SaveOrder) -> WriteRequest:
    """Ask a companion process for what the order says, and tell it the structure."""
    return WriteRequest(
        step=order.step,
        claim=order.claim,
        nonce=order.nonce,
        values=order.values,
        structure_key=order.structure.key,
        structure=order.structure.text,
    )


@dataclass
class SmallRoot:
    """A root, and the starts of the job default/lm that save small checkpoints there."""

    url: str = field(default_factory=lambda: f"memory://{secrets.token_hex(8)}")
    words: InitVar[str] = ""
    """What is played there at first."""

    store: Store = field(init=False)
    log: Log = field(init=False)
    claim: Claim = field(init=False)
    """The claim of the last `begin`."""

    def __post_init__(self, words: str) -> None:
        self.store = open_store(self.url)
        self.log = Log(self.store)
        if words:
            self.play(words)

    _starts: int = field(init=False, default=0)

    def play(self, words: str) -> int:
        """Do what the words say, and return the last slot of the log. Each word but `+150` takes a slot.

        `begin` is a start that goes on from HEAD, `begin@2` from the commit of slot 2, `begin@s5` from another
        writer's step 5, and `begin?s5` is offered that step. `scratch` goes on from nothing. `branch` begins a branch
        in the process that runs, and `back@2` goes back there. `10` commits that step, and `10x2` does so for two
        ranks. `-1` deletes the commit of slot 1 and leaves its data, `!1` condemns it, `*1` says that it was
        restored. `+150` is a whole save that isn't committed, `^150` one that the log gives up, and `voidx3` are
        three entries that say nothing.
        """
        for word in words.split():
            verb, _, number = word.partition("x")
            self._act(verb, int(number or 1))
        return self.log.state.tail

    def _act(self, word: str, n: int) -> None:
        number = int(found[0]) if (found := re.search(r"\d+$", word)) else 0
        match word[0]:
            case "b" | "s":
                self._begin(word, number)
            case "v":
                for _ in range(n):
                    self.log.void(self.claim, "nothing to save", f"{self.log.state.tail}/0-{'a' * 32}")
            case "+":
                self.leave(number)
            case "^":
                self.log.void(self.claim, "given up", self.leave(number))
            case "-":
                self.log.delete(self.claim, lambda _: [number])
            case "!":
                self.log.quarantine(self.claim, number, "read bad")
            case "*":
                self.log.mark_restored(self.claim, number)
            case _:
                self.save(number, world_size=n)

    def _begin(self, word: str, number: int) -> None:
        is_same = word.startswith(("branch", "back"))
        self._starts += not is_same
        theirs = ForeignBase(step=number, folder=str(number)) if "s" in word[4:] else None
        self.claim = self.log.begin(
            pod_identity(restart_attempt=self._starts - 1),
            base=(theirs or number) if "@" in word else None,
            offer=lambda: theirs,
            scratch=word == "scratch",
            branch=word == "branch",
            after=self.claim if is_same else None,
            host=f"host-{self._starts - 1}",
        )

    def begin(self, attempt: int = 0, base: int | None = None) -> None:
        """Claim the root as that start of the job, to go on from the commit in slot `base`, or from HEAD."""
        self._starts = attempt + 1
        self.claim = self.log.begin(pod_identity(restart_attempt=attempt), base=base, host=f"host-{attempt}")

    def save(
        self,
        step: int,
        *,
        world_size: int = 1,
        value: bytes = _VALUE,
        metrics: dict[str, str] | None = None,
    ) -> CommitRecord:
        """Write and commit a small checkpoint under the last claim, as `save_small` does."""
        return save_small(
            self.log, self.store, self.claim, step, world_size=world_size, value=value, metrics=metrics
        )

    def give_up(self, step: int) -> str:
        """Write a small checkpoint that is never committed, and return its folder."""
        return write_small(self.store, self.claim, step)[0].folder

    def leave(self, step: int) -> str:
        """Write a whole checkpoint that isn't committed, and return its folder."""
        manifest, *_ = write_small(self.store, self.claim, step)
        return finish_checkpoint(self.store, manifest, []).folder

    def contents(self) -> dict[str, bytes]:
        """Return all objects of the root, by path."""
        return {stat.path: self.store.read(stat.path) for stat in self.store.list("")}

    def change(self, path: str, data: bytes | None) -> None:
        """Replace the bytes of the object at `path`; None deletes it."""
        self.store.delete(path)
        if data is not None:
            self.store.write(path, [data])

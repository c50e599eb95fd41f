"""Taking a snapshot: all that the train loop waits for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper.checkpoint import TensorOrder, ValueOrder
from stepkeeper.errors import SaveError
from stepkeeper.save.snapshot import device
from stepkeeper.save.snapshot.copying import copy_all, copy_host_tensors
from stepkeeper.save.snapshot.plan import SnapshotPlan, laid_out_behind, plan_snapshot
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.summary import StateSummary
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.assignment import LARGE_VALUE_BYTES
from stepkeeper_planners.saving.fingerprints import digest_integer_tensor, digest_value
from stepkeeper_planners.state.per_rank import stored_name
from stepkeeper_planners.state.structure import StructureCache
from stepkeeper_planners.state.tree import FlatState
from stepkeeper_planners.state.values import encode_value

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import DevicePiece, HostPart

__all__ = ["Snapshot", "Snapshots"]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """This rank's share of the state after one step. Host tensors are in the region; device copies still have to go."""

    plan: SnapshotPlan
    values: tuple[ValueOrder, ...]
    summary: StateSummary
    """What of the state all ranks must have alike."""

    on_device: list["DevicePiece"] = field(default_factory=list)
    """Copies of XLA tensors: nothing that happens to the state changes them."""

    copied: tuple[str, ...] = ()
    """The tensors that these are copies of: all of them have to come."""

    copies: device.DeviceCopies
    """Who made them."""

    _dropped: bool = False

    @property
    def tensors(self) -> tuple[TensorOrder, ...]:
        return self.plan.orders

    def transfer(self, region: Region) -> None:
        """All bytes are in the region; each device copy was dropped as soon as it was there.

        Called from a background thread. The GIL is held while a piece moves, not while its copy isn't made yet.
        """
        if not self.copied:
            return
        batches: list[list[DevicePiece]] = []
        try:
            from stepkeeper_planners.adapters import xla_pieces

            arrivals = _Arrivals(self.plan, region, self.copied)
            batches += list(device.batches(self.on_device))[::-1]
            xla_pieces.wait_until_computed(self.on_device)
            self.on_device.clear()
            while batches:
                arrivals.put((piece.fqn, parts) for piece, parts in xla_pieces.move_to_host(batches.pop()))
            arrivals.check()
        except RuntimeError as error:
            self.copies.refused(error, self.plan.cuts, self.copied)
            raise
        finally:
            batches.clear()
            self.drop()

    def drop(self) -> None:
        """Its copies are on the devices no more, whether they were moved or not."""
        self.on_device.clear()
        if self.copied and not self._dropped:
            self._dropped = True
            self.copies.left()


class Snapshots:
    """Takes the snapshots of one rank, each into a region that the caller chooses."""

    def __init__(self, ranks: Ranks, *, device_budget_bytes: int | None = None) -> None:
        """`device_budget_bytes` may be used for copies on this process's devices; None: as much as there is."""
        self._ranks = ranks
        # A rank alone writes all values, however large they are.
        large_value_bytes = None if ranks.world_size == 1 else LARGE_VALUE_BYTES
        self._structures: Final[StructureCache[SnapshotPlan]] = StructureCache(
            partial(plan_snapshot, ranks=ranks), large_value_bytes=large_value_bytes
        )
        self._copies = device.DeviceCopies(device_budget_bytes)

    def prepare(self, state: Mapping[str, object]) -> int:
        """A snapshot of `state` compiles nothing any more. The answer is how many bytes of a region it takes.

        Raises:
            UnsupportedValueError: as `take`.
            UnsupportedShardingError: as `take`.

        """
        found = self._structures.look_up(state)
        flat, plan = found.flat, found.derived
        made, rest = self._copies.make(flat.tensors, plan.cuts, device.to_copy(plan.cuts, plan.mine))
        if made:
            self._copies.left()
        device.compile_moves(flat.tensors, plan.cuts, rest)
        return laid_out_behind(plan, self._blobs(flat, plan))[1]

    def take(
        self, state: Mapping[str, object], region: Region, *, timeout_s: float | None = None
    ) -> Snapshot:
        """The state may change again: the snapshot does not follow it.

        XLA tensors are copied on their devices, and only the dispatch of that is waited for; those that the devices
        have no room for are moved into the region, as CPU tensors are. What is pending is started first, by the same
        program that the loop's own `torch_xla.sync()` would start.

        Raises:
            UnsupportedValueError: a value is of a type that is not stored; it names the key.
            UnsupportedShardingError: a tensor is placed in a way that can't be described, or that no rank knows alone.
            TimeoutError: an earlier snapshot's copies leave no room for this one's after `timeout_s`.
            SaveError: the devices have no room, and that can't be made good.

        """
        found = self._structures.look_up(state)
        flat, plan = found.flat, found.derived
        blobs = self._blobs(flat, plan)
        wanted = device.to_copy(plan.cuts, plan.mine)
        pieces, rest = self._copies.make(flat.tensors, plan.cuts, wanted, timeout_s=timeout_s)
        try:
            values, size_bytes = laid_out_behind(plan, blobs)
            region.reserve(size_bytes)
            for order in values:
                region.write(order.start, blobs[order.fqn])
            copy_host_tensors(flat.tensors, plan, region)
            self._move_now(flat, plan, rest, region)
            on_host = frozenset(rest)
            return Snapshot(
                plan=plan,
                values=values,
                summary=_summary(flat, plan, self._ranks),
                on_device=pieces,
                copied=tuple(fqn for fqn in wanted if fqn not in on_host),
                copies=self._copies,
            )
        except BaseException:
            if pieces:
                self._copies.left()
            raise

    def _move_now(self, flat: FlatState, plan: SnapshotPlan, fqns: Sequence[str], region: Region) -> None:
        arrivals = _Arrivals(plan, region, fqns)
        for moved in device.moved(flat.tensors, plan.cuts, fqns):
            arrivals.put(moved)
        arrivals.check()

    def _blobs(self, flat: FlatState, plan: SnapshotPlan) -> dict[str, bytes]:
        blobs = {fqn: encode_value(fqn, flat.values[fqn]) for fqn in plan.values}
        for fqn, value in flat.per_rank.items():
            blobs[stored_name(fqn, self._ranks)] = encode_value(fqn, value)
        return blobs


def _summary(flat: FlatState, plan: SnapshotPlan, ranks: Ranks) -> StateSummary:
    if ranks.world_size == 1:
        return StateSummary()
    numbers = {fqn: digest_integer_tensor(flat.tensors[fqn]) for fqn in plan.whole_numbers}
    return StateSummary(
        layouts=plan.layouts,
        layout_digests=lambda: plan.layout_digests,
        values={fqn: digest_value(fqn, value) for fqn, value in flat.values.items()},
        contents={fqn: digest for fqn, digest in numbers.items() if digest is not None},
        aliases=dict(flat.aliases),
        per_rank=tuple(flat.per_rank),
    )


class _Arrivals:
    """Elements of XLA tensors as they come into the region, counted: what is missing would be an older save's."""

    def __init__(self, plan: SnapshotPlan, region: Region, fqns: Iterable[str]) -> None:
        """All that this rank writes of these tensors is to come."""
        self._plan = plan
        self._region = region
        self._missing = {fqn: sum(write.box.volume for _, write in plan.mine.get(fqn, ())) for fqn in fqns}

    def put(self, moved: Iterable[tuple[str, list["HostPart"]]]) -> None:
        """What this rank writes of these elements is in the region."""
        places = self._region.places(self._plan.orders)
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for fqn, parts in moved:
            whole = self._plan.by_box.get(fqn, {})
            for box, data in parts:
                index = whole.get(box)
                if index is not None:
                    destinations.append(places[index])
                    sources.append(data)
                    self._missing[fqn] -= box.volume
                    continue
                for index, write in self._plan.mine.get(fqn, ()):
                    common = box.intersect(write.box)
                    if common is not None:
                        destinations.append(places[index][_within(common, write.box)])
                        sources.append(data[_within(common, box)])
                        self._missing[fqn] -= common.volume
        copy_all(destinations, sources)

    def check(self) -> None:
        """All that this rank writes of these tensors came.

        Raises:
            SaveError: elements are lacking.

        """
        lacking = next((fqn for fqn, missing in self._missing.items() if missing), None)
        if lacking is not None:
            raise SaveError(
                f"{lacking}: {self._missing[lacking]} elements less than expected came from the devices"
            )


def _within(common: Box, box: Box) -> tuple[slice, ...]:
    return common.relative_to(box.offsets).slices

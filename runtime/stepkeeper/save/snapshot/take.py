"""Take a snapshot of a state: the part of a save that the train loop waits for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper.checkpoint.orders import TensorOrder, ValueOrder
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import SaveError
from stepkeeper.save.first_comparison import FirstComparison
from stepkeeper.save.given_state import check_not_empty
from stepkeeper.save.snapshot import device, device_pieces
from stepkeeper.save.snapshot.copying import copy_host_tensors, copy_tensors
from stepkeeper.save.snapshot.plan import SnapshotPlan, place_values, plan_snapshot
from stepkeeper.save.snapshot.region import Region
from stepkeeper.time_limits import TimeLimits
from stepkeeper_planners.adapters.open_shardings import keep_shardings_open
from stepkeeper_planners.garbage import without_collections
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.assignment import LARGE_VALUE_BYTES
from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.fingerprints import digest_names, digest_value
from stepkeeper_planners.state.per_rank import stored_name
from stepkeeper_planners.state.structure import LookUpResult, StructureCache
from stepkeeper_planners.state.tree import FlatState, Modules
from stepkeeper_planners.state.values import encode_value

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import DevicePiece, HostPart

__all__ = ["Snapshot", "SnapshotTaker"]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """This rank's share of the state after one step.

    Host tensors are in the region; copies on devices still have to be moved.
    """

    plan: SnapshotPlan
    values: tuple[ValueOrder, ...]
    digest: Callable[[], dict[str, bytes]]
    """Computes a digest for each name whose content must be equal on all ranks, as of the snapshot."""

    on_device: list["DevicePiece"] = field(default_factory=list)
    """Copies of XLA tensors. Changes of the state don't affect them."""

    copied: tuple[str, ...] = ()
    """Names of the tensors that were copied on the devices. All of their elements have to arrive."""

    copies: device.DeviceCopies
    """The object that made the copies, and counts them."""

    copy_digests: CopyDigests = field(default_factory=lambda: CopyDigests(()))
    """The digests of what this rank and others hold copies of."""

    moved_bytes: int = 0
    """Number of bytes that have come from the devices so far."""

    _dropped: bool = False

    @property
    def tensors(self) -> tuple[TensorOrder, ...]:
        return self.plan.orders

    @property
    def transfer_bytes(self) -> int:
        """Number of bytes that the devices have, or had, to transfer."""
        return device.sum_device_bytes(self.plan.clones, self.copied)

    def move_copies(self, region: Region) -> None:
        """Move all device copies into the region, and drop each as soon as it has arrived. Read the digests too.

        A background thread calls this. It holds the GIL while a piece moves, but not while it waits for a
        copy.
        """
        if not self.copied:
            self.copy_digests.await_devices()
            return
        batches: list[list[DevicePiece]] = []
        try:
            from stepkeeper_planners.adapters import xla_pieces

            filler = _RegionFiller(self.plan, region, self.copied)
            # Popped from the end, so that each batch is freed once it is moved.
            batches += list(device_pieces.batch_pieces(self.on_device))[::-1]
            xla_pieces.wait_until_computed(self.on_device)
            self.on_device.clear()
            while batches:
                batch_bytes = sum(piece.size_bytes for piece in batches[-1])
                filler.put_parts(
                    (piece.fqn, parts) for piece, parts in xla_pieces.move_to_host(batches.pop())
                )
                self.moved_bytes += batch_bytes
            filler.check_complete()
            self.copy_digests.await_devices()
        except RuntimeError as error:
            self.copies.handle_refusal(error, self.plan.clones, self.copied)
            raise
        finally:
            batches.clear()
            self.drop_copies()

    def drop_copies(self) -> None:
        """Drop the copies on the devices, whether they were moved or not."""
        self.on_device.clear()
        if self.copied and not self._dropped:
            self._dropped = True
            self.copies.release_copies()


class SnapshotTaker:
    """Take the snapshots of one rank, each into a region that the caller chooses."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        device_budget_bytes: int | None = None,
        all_first: bool = False,
        waits: Waits | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        self._ranks = ranks
        # A rank alone writes all values, however large they are.
        large_value_bytes = None if ranks.world_size == 1 else LARGE_VALUE_BYTES
        self._first: Final = {""} if all_first else set[str]()
        """The modules, optimizers and entries of the state that the first rank writes: their copies have differed."""

        self._structures: Final[StructureCache[SnapshotPlan]] = StructureCache(
            partial(plan_snapshot, ranks=ranks, first=self._first), large_value_bytes=large_value_bytes
        )
        self._copies = device.DeviceCopies(device_budget_bytes, waits, limits)

    def prepare(self, state: Mapping[str, object], region: Region, modules: Modules = ()) -> int:
        """Plan a snapshot of `state`, compile its programs, reserve the region, and return how many bytes it takes."""
        found = self._look_up(state, modules)
        flat, plan = found.flat, found.derived
        with keep_shardings_open(flat.tensors[fqn] for fqn in plan.left_open):
            made, no_room = self._copies.make_copies(
                flat.tensors, plan.clones, device_pieces.select_copied(plan.clones, plan.writes)
            )
            if made:  # only for their programs
                self._copies.release_copies()
            device_pieces.compile_moves(flat.tensors, plan.clones, no_room)
            CopyDigests(plan.copies).start_on_devices(flat.tensors)
        size_bytes = place_values(plan, self._encode_values(flat, plan))[1]
        region.reserve(size_bytes)
        region.view_orders(plan.orders)
        return size_bytes

    def take_snapshot(
        self,
        state: Mapping[str, object],
        region: Region,
        *,
        timeout_s: float | None = None,
        on_tensors: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        compare: FirstComparison | None = None,
    ) -> Snapshot:
        """Take a snapshot of `state`, which may change afterwards without affecting the snapshot.

        XLA tensors are copied on their devices, and this waits only for the dispatch. Tensors that the
        devices have no room for are moved into the region, and CPU tensors are copied there. Pending
        computations are started first, by the same program that the loop's own `torch_xla.sync()` would
        start. If `compare` finds that copies differ, the first rank writes them, now and from now on.

        Raises ValueError if `state` is empty, UnsupportedValueError and UnsupportedShardingError by name,
        TimeoutError if copies of an earlier snapshot leave no room for `timeout_s`, SaveError if the devices
        never have room.
        """
        with without_collections():
            found = self._look_up(state)
        flat, plan = found.flat, found.derived
        if compare is not None and (compare.reads_devices or not any(c.on_devices for c in plan.copies)):
            plan = self._compare(flat, plan, compare)
        digests = CopyDigests(plan.copies)
        with keep_shardings_open(flat.tensors[fqn] for fqn in plan.left_open):
            snapshot = digests.read(flat.tensors, partial(self._copy_state, flat, plan, region, timeout_s))
        snapshot.copy_digests = digests
        if on_tensors is not None:
            on_tensors(flat.tensors)
        return snapshot

    def _compare(self, flat: FlatState, plan: SnapshotPlan, compare: FirstComparison) -> SnapshotPlan:
        while True:
            digests = CopyDigests(plan.copies)
            with keep_shardings_open(flat.tensors[fqn] for fqn in plan.left_open):
                digests.read(flat.tensors, digests.await_devices)
            verdict = compare(digests, _prepare_digest(flat, plan, self._ranks), flat)
            if verdict is None:
                return plan
            self._first.update(verdict.first)
            plan = self._structures.derive_again(flat)

    def _copy_state(
        self, flat: FlatState, plan: SnapshotPlan, region: Region, timeout_s: float | None
    ) -> Snapshot:
        blobs = self._encode_values(flat, plan)
        to_copy = device_pieces.select_copied(plan.clones, plan.writes)
        pieces, no_room = self._copies.make_copies(flat.tensors, plan.clones, to_copy, timeout_s=timeout_s)
        try:
            values, size_bytes = place_values(plan, blobs)
            region.reserve(size_bytes)
            for order in values:
                region.write_bytes(order.start, blobs[order.fqn])
            with without_collections():
                region.view_orders(plan.orders)  # made in the first save, and kept
            copy_host_tensors(flat.tensors, plan, region)
            self._move_tensors(flat, plan, no_room, region)
            moved = frozenset(no_room)
            return Snapshot(
                plan=plan,
                values=values,
                digest=_prepare_digest(flat, plan, self._ranks),
                on_device=pieces,
                copied=tuple(fqn for fqn in to_copy if fqn not in moved),
                copies=self._copies,
            )
        except BaseException:
            if pieces:
                self._copies.release_copies()
            raise

    def _look_up(self, state: Mapping[str, object], modules: Modules = ()) -> LookUpResult[SnapshotPlan]:
        found = self._structures.look_up(state, modules)
        check_not_empty(found.flat.tensors, found.flat.values, found.flat.per_rank)
        return found

    def _move_tensors(self, flat: FlatState, plan: SnapshotPlan, fqns: Sequence[str], region: Region) -> None:
        filler = _RegionFiller(plan, region, fqns)
        for moved in device_pieces.move_tensors(flat.tensors, plan.clones, fqns):
            filler.put_parts(moved)
        filler.check_complete()

    def _encode_values(self, flat: FlatState, plan: SnapshotPlan) -> dict[str, bytes]:
        blobs = {fqn: encode_value(fqn, flat.values[fqn]) for fqn in plan.values}
        for fqn, value in flat.per_rank.items():
            blobs[stored_name(fqn, self._ranks)] = encode_value(fqn, value)
        return blobs


def _prepare_digest(flat: FlatState, plan: SnapshotPlan, ranks: Ranks) -> Callable[[], dict[str, bytes]]:
    if ranks.world_size == 1:
        return dict
    values = {fqn: digest_value(fqn, value) for fqn, value in flat.values.items()}
    aliases, per_rank = dict(flat.aliases), tuple(flat.per_rank)
    return lambda: digest_names(
        plan.layouts,
        layout_digests=plan.layout_digests,
        values=values,
        aliases=aliases,
        per_rank_keys=per_rank,
    )


class _RegionFiller:
    """Put elements of XLA tensors into the region, and count them: where one is lacking, an older save's would stay."""

    def __init__(self, plan: SnapshotPlan, region: Region, fqns: Iterable[str]) -> None:
        """Expect all that this rank writes of these tensors."""
        self._plan = plan
        self._region = region
        self._missing = {
            fqn: sum(write.box.volume for _, write in plan.writes_by_fqn.get(fqn, ())) for fqn in fqns
        }

    def put_parts(self, moved: Iterable[tuple[str, list["HostPart"]]]) -> None:
        """Copy this rank's part of the moved elements into the region."""
        places = self._region.view_orders(self._plan.orders)
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for fqn, parts in moved:
            by_box = self._plan.index_by_box.get(fqn, {})
            for box, data in parts:
                index = by_box.get(box)  # mostly a part is just what one write takes
                if index is not None:
                    destinations.append(places[index])
                    sources.append(data)
                    self._missing[fqn] -= box.volume
                    continue
                for index, write in self._plan.writes_by_fqn.get(fqn, ()):
                    common = box.intersect(write.box)
                    if common is not None:
                        destinations.append(places[index][_slice_common(common, write.box)])
                        sources.append(data[_slice_common(common, box)])
                        self._missing[fqn] -= common.volume
        copy_tensors(destinations, sources)

    def check_complete(self) -> None:
        """Check that all expected elements have arrived. Raises SaveError."""
        lacking = next((fqn for fqn, missing in self._missing.items() if missing), None)
        if lacking is not None:
            raise SaveError(
                f"{lacking}: {self._missing[lacking]} elements fewer than expected came from the devices"
            )


def _slice_common(common: Box, box: Box) -> tuple[slice, ...]:
    return common.relative_to(box.offsets).slices

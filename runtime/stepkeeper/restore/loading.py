"""One commit on its way into one rank's state: compared first, then filled."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepkeeper.checkpoint import CheckpointReader, read_manifests
from stepkeeper.dcp.metadata import merge_tensors, merge_values
from stepkeeper.fitting import findings_said, said_findings
from stepkeeper.log import CommitRecord
from stepkeeper.manifest import Manifest, TensorRecord, ValueRecord
from stepkeeper.restore.placing import loads_of, read_ahead, read_value, stored_tensor
from stepkeeper.snapshot import run_pending
from stepkeeper.storage import Store
from stepkeeper_planners import adapters
from stepkeeper_planners.asking import wanted_of
from stepkeeper_planners.differences import Findings, mismatch, unexpected_everywhere
from stepkeeper_planners.layout import Ranks
from stepkeeper_planners.matching import StateReads, Stored, Wanted, compare
from stepkeeper_planners.state import FlatState, gather_state, scatter_state

__all__ = ["Loading", "agreed_mismatch"]


class Loading:
    """One commit on its way into one rank's state: first `compare`, then, when all ranks have, `fill`."""

    def __init__(self, store: Store, record: CommitRecord, state: Mapping[str, object], ranks: Ranks) -> None:
        self._store, self._record, self._state, self._ranks = store, record, state, ranks
        self._flat = FlatState(tensors={}, values={})
        self._wanted = Wanted(layouts=())
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._manifests: Sequence[Manifest] = ()
        self._tensors: Mapping[str, TensorRecord] = {}
        self._values: Mapping[str, ValueRecord] = {}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """What the commit holds; known once it was compared."""
        return (*self._tensors, *self._values)

    def compare(self) -> dict[str, Any]:
        """What to read is known, and what this rank has to say about where its state doesn't fit. Nothing is changed.

        Raises:
            TornCheckpointError: bytes of the commit's manifests are bad.
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
            StorageError: the store gave no answer, or refused.

        """
        self._manifests = read_manifests(self._store, self._record)
        self._tensors, self._values = merge_tensors(self._manifests), merge_values(self._manifests)
        self._flat = gather_state(self._state)
        self._wanted = wanted_of(self._flat, self._ranks)
        stored = {fqn: stored_tensor(tensor) for fqn, tensor in self._tensors.items()}
        self._reads, differences = compare(
            self._wanted, Stored(tensors=stored, values=tuple(self._values)), self._ranks
        )
        if not differences:
            return {}
        findings = Findings.of(differences, self.stored_names, short=self._ranks.rank != 0)
        return {"findings": findings_said(findings)}

    def fill(self) -> dict[str, Any]:
        """This rank's part of the state is what the commit holds, tensors in place, Statefuls by load_state_dict().

        Raises:
            TornCheckpointError: bytes of the commit are bad. The state is part old, part new then.
            StorageError: the store gave no answer, or refused.

        """
        flat, reads = self._flat, self._reads
        reader = CheckpointReader(self._store, self._manifests)
        loads = loads_of(self._wanted, reads, self._tensors, self._ranks.rank)
        for load, shards in read_ahead(reader, loads):
            adapters.fill(flat.tensors[load.layout.fqn], shards)
        names = dict.fromkeys(name for read in reads.values for name in read.stored_names)
        read_values = {name: read_value(reader, name, self._values[name]) for name in names}
        loaded = {
            read.fqn: read.value_from(read_values, flat.resizers.get(read.fqn), self._ranks)
            for read in reads.values
        }
        scatter_state(self._state, flat, loaded)
        run_pending(flat.tensors)
        return {}


def agreed_mismatch(loading: Loading, uri: str, said: Sequence[dict[str, Any]]) -> Exception | None:
    """One report of where the ranks' states don't fit; names that only some ranks ask for are no reason."""
    found = [said_findings(each["findings"]) if "findings" in each else None for each in said]
    differences = unexpected_everywhere(found, loading.stored_names)
    partly = (
        "CheckpointManager restores a state as a whole. A part of this commit, or other dtypes: load it with "
        f"torch.distributed.checkpoint from {uri}, with SPMDLoadPlanner's strict, items, exclude and cast."
    )
    return mismatch(differences, partly) if any(differences) else None

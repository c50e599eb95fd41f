"""The mechanisms that keep checkpoints from being lost or mixed, and trainings from hanging; each can be taken out."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from replacements import (
    Alike,
    answer,
    become,
    begin_from_nothing,
    commit_with_those_who_wrote,
    delete_data_first,
    forget_pending,
    let_older_starts_claim,
    note_whatever_was_read,
    overlook_ends,
    replace_what_is_there,
    reuse_layout,
    take_all_for_verified,
    without_condition_on_data,
    without_condition_on_entries,
    without_fsync,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A mechanism, and how it is taken out."""

    without: str
    """What the code does without it."""

    symbol: str
    """module:name, or module:Class.name, where the mechanism is called or defined."""

    instead: Callable[[Any], Any]
    """Returns what stands in the symbol's place; it is given the symbol's value."""

    test: str
    """The test that fails without it."""

    hangs: bool = False
    """True if the test may fail by its timeout."""

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    def find_owner(self, module: ModuleType) -> tuple[Any, str]:
        """Return the module or class that defines the symbol, and its name there. Raises AttributeError."""
        *classes, name = self.symbol.partition(":")[2].split(".")
        owner: Any = reduce(getattr, classes, module)
        if name not in vars(owner):
            raise AttributeError(f"{self.symbol} is gone")
        return owner, name


_LOG_RULES: Final = "tests/unit/runtime/test_log_rules.py"
_BYTES: Final = "tests/property/test_storage_bytes.py"
_CUT: Final = "tests/property/test_storage_power_cut.py::test_nothing_that_was_answered_is_lost"
_GCS: Final = "tests/contract/test_store_gcs_requests.py"
_LOG_LINES: Final = "tests/unit/runtime/test_log_lines.py"
_GARBAGE: Final = "tests/unit/runtime/test_garbage.py"
_ROOT_CHECK: Final = "tests/unit/runtime/test_root_check.py"
_OBJECTS: Final = "tests/unit/runtime/test_checkpoint_objects.py"
_LINES: Final = "tests/integration/test_manager_branches.py"

MECHANISMS: Final = {
    # Claims and the log
    "fence": Mechanism(
        without="A process appends to the log although a later one has claimed the root.",
        symbol="stepkeeper.log.appending:check_claim",
        instead=answer(None),
        test=f"{_LOG_RULES}::test_a_later_begin_fences_the_earlier_claim",
    ),
    "fence of companions": Mechanism(
        without="A training saves on although another start has claimed the root.",
        symbol="stepkeeper.log.claims:check_claim",
        instead=answer(None),
        test="tests/integration/test_manager_process.py::test_a_later_claim_stops_a_trainer_that_still_runs",
    ),
    "claim of a reader": Mechanism(
        without="A process whose claim is stale restores what HEAD was.",
        symbol="stepkeeper.log.log:check_claim",
        instead=answer(None),
        test=f"{_LOG_RULES}::test_a_later_begin_fences_the_earlier_claim",
    ),
    "foreign root": Mechanism(
        without="A job claims the root of another one.",
        symbol="stepkeeper.log.log:check_owner",
        instead=answer(None),
        test=f"{_LOG_RULES}::test_another_jobs_root_needs_a_take_over",
    ),
    "order of starts": Mechanism(
        without="An older start of a job claims the root after a later one.",
        symbol="stepkeeper.log.log:check_owner",
        instead=let_older_starts_claim,
        test=f"{_LOG_RULES}::test_an_older_start_of_the_same_job_is_fenced",
    ),
    "condemned is no scratch": Mechanism(
        without="A training begins from nothing where all commits were condemned.",
        symbol="stepkeeper.log.log:resolve_base",
        instead=begin_from_nothing,
        test=f"{_LOG_LINES}::test_a_root_without_a_latest_commit_is_begun_only_by_who_says_where_from",
    ),
    "unknown outcome": Mechanism(
        without="Something is appended while an entry without an answer may still come into the log.",
        symbol="stepkeeper.log.appending:Appender.settle",
        instead=forget_pending,
        test=f"{_LOG_RULES}::test_an_unknown_outcome_is_settled_before_anything_else_is_appended",
    ),
    "gaps": Mechanism(
        without="A log in which an entry is missing is read up to the gap.",
        symbol="stepkeeper.log.tail:_check_no_gap",
        instead=answer(None),
        test="tests/unit/runtime/test_log_opening.py::"
        "test_a_tail_is_found_page_by_page_and_a_gap_before_it_is_refused",
    ),
    "entry checksum": Mechanism(
        without="A damaged entry of the log is believed.",
        symbol="stepkeeper.log.entries:crc32c",
        instead=lambda crc: lambda data: Alike(crc(data)),
        test=f"{_BYTES}::test_a_flipped_bit_in_any_byte_of_an_entry_is_seen_when_the_log_is_opened",
    ),
    # Stores
    "exclusive create": Mechanism(
        without="Of two writers of one name on a file system both win.",
        symbol="stepkeeper.storage.posix:PosixStore._link",
        instead=replace_what_is_there,
        test="tests/contract/test_stores.py::test_of_64_threads_in_8_processes_one_wins_each_slot[linked]",
    ),
    "exclusive rename": Mechanism(
        without="A rename replaces what is there, on file systems without links.",
        symbol="stepkeeper.storage.posix_files:_RENAME_NOREPLACE",
        instead=become(0),
        test="tests/unit/runtime/test_storage_posix.py::"
        "test_without_links_a_name_is_taken_by_a_rename_that_replaces_nothing_or_not_at_all",
    ),
    "generation match of entries": Mechanism(
        without="An entry of the log overwrites another one in a bucket.",
        symbol="stepkeeper.storage.gcs:GcsStore._blob",
        instead=without_condition_on_entries,
        test=f"{_GCS}::test_an_entry_of_the_log_is_one_request_with_a_condition_and_a_checksum",
    ),
    "generation match of data": Mechanism(
        without="Data overwrites other data in a bucket.",
        symbol="stepkeeper.storage.gcs_upload:urlencode",
        instead=without_condition_on_data,
        test=f"{_GCS}::test_bulk_data_is_sent_with_a_condition_and_a_checksum_of_the_whole",
    ),
    "fsync of files": Mechanism(
        without="A power cut empties files that were reported as written.",
        symbol="stepkeeper.storage.posix:os",
        instead=without_fsync,
        test=f"{_CUT}[saving]",
    ),
    "fsync of folders": Mechanism(
        without="A power cut takes away the names of files that were reported as written.",
        symbol="stepkeeper.storage.posix:PosixStore._sync_folders",
        instead=answer(None),
        test=f"{_CUT}[saving]",
    ),
    "fsync of folders above the root": Mechanism(
        without="A power cut takes away the root that a killed process had made.",
        symbol="stepkeeper.storage.posix:sync_above",
        instead=answer(None),
        test=f"{_CUT}[meeting_folders]",
    ),
    "one root": Mechanism(
        without="Hosts that see different folders under one path save into them.",
        symbol="stepkeeper.coordination.root_check:_verdict",
        instead=lambda verdict: lambda uri, findings, host: verdict(uri, findings[:1], host),
        test=f"{_ROOT_CHECK}::test_two_hosts_with_disks_of_their_own_are_refused_at_once_and_named",
    ),
    "one winner": Mechanism(
        without="A store is accepted in which another host can take a name that is taken.",
        symbol="stepkeeper.coordination.root_check:_could_take",
        instead=answer(value=False),
        test=f"{_ROOT_CHECK}::test_a_fault_on_one_rank_is_outlasted_or_told_to_all[two win]",
    ),
    # Saving
    "vote": Mechanism(
        without="A save is committed that one rank couldn't write.",
        symbol="stepkeeper.save.persist:_commit_or_void",
        instead=commit_with_those_who_wrote,
        test="tests/unit/runtime_process/test_save_votes.py::test_what_one_rank_could_not_write_is_void",
    ),
    "one state": Mechanism(
        without="States that differ between ranks are saved as one.",
        symbol="stepkeeper.save.consistency:_judge_proposals",
        instead=answer({"error": None, "groups": [], "copies": {}, "is_mixed": False}),
        test="tests/integration/test_manager_ranks.py::"
        "test_states_that_differ_are_refused_in_all_ranks_before_anything_is_written",
    ),
    "equal copies": Mechanism(
        without="A tensor is divided among ranks that hold different copies of it.",
        symbol="stepkeeper.save.consistency:group_ranks",
        instead=answer({}),
        test="tests/unit/runtime_process/test_copies_that_differ.py::"
        "test_of_entries_of_dicts_the_first_ranks_copies_are_written",
    ),
    "one save": Mechanism(
        without="Manifests of different saves are committed as one checkpoint.",
        symbol="stepkeeper.checkpoint.finishing:_check_one_save",
        instead=answer(None),
        test=f"{_OBJECTS}::test_ranks_that_do_not_fit_together_are_no_checkpoint",
    ),
    "agreement": Mechanism(
        without="Each rank acts on a wish after the step that it has passed itself.",
        symbol="stepkeeper.coordination.agreement_rules:RankView.receive_conclusion",
        instead=lambda hear: lambda view, _: hear(view, view.passed),
        test="tests/unit/runtime_process/test_step_agreement.py::test_all_ranks_act_at_the_same_steps",
    ),
    "key of the structure": Mechanism(
        without="A companion writes a state by the structure of another one.",
        symbol="stepkeeper.checkpoint.layout_cache:LayoutCache.find_structure",
        instead=lambda _: lambda cache, _key: cache._structure,
        test="tests/unit/runtime_process/test_companion_saves.py::"
        "test_another_structure_has_another_key_and_only_the_last_is_held",
    ),
    "key of the layout": Mechanism(
        without="A save is written by the layout of an earlier one with other values.",
        symbol="stepkeeper.checkpoint.layout_cache:LayoutCache.get_layout",
        instead=reuse_layout,
        test="tests/unit/runtime/test_packing.py::"
        "test_what_an_earlier_save_has_left_changes_nothing_that_is_stored",
    ),
    "verify after commit": Mechanism(
        without="A commit whose objects are missing or damaged in the store counts as verified.",
        symbol="stepkeeper.checkpoint.finishing:verify_objects",
        instead=answer(None),
        test=f"{_OBJECTS}::test_damage_is_seen_right_after_the_save",
    ),
    "comparison of staged data": Mechanism(
        without="What a local disk has damaged is uploaded to the root.",
        symbol="stepkeeper.tier.staging:block_crcs",
        instead=answer(Alike()),
        test="tests/unit/runtime/test_local_tier.py::"
        "test_a_disk_that_holds_something_else_by_then_uploads_nothing_of_it",
    ),
    "order of a DCP folder": Mechanism(
        without="An overwritten DCP checkpoint loses its data before the new one can be read.",
        symbol="stepkeeper.dcp.writer:_DATA",
        instead=become(re.compile("(?!)")),
        test="tests/integration/test_dcp_storage.py::test_killed_anywhere_what_can_be_read_is_whole",
    ),
    # Restoring
    "block checksum": Mechanism(
        without="Damaged tensors are restored.",
        symbol="stepkeeper.checkpoint.reading:block_crcs",
        instead=answer(Alike()),
        test=f"{_BYTES}::test_a_flipped_bit_anywhere_in_an_object_is_seen[__0_0.distcp]",
    ),
    "manifest checksum": Mechanism(
        without="A damaged manifest is believed.",
        symbol="stepkeeper.checkpoint.reading:_find_difference",
        instead=answer(None),
        test=f"{_BYTES}::test_a_flipped_bit_anywhere_in_an_object_is_seen[manifest.0.json]",
    ),
    "proof by a whole restore": Mechanism(
        without="Who restored a part deletes, as its own past, commits that hold more.",
        symbol="stepkeeper_planners.loading.selection:LoadRules.is_whole",
        instead=become(property(lambda _: True)),
        test=f"{_LINES}::test_who_has_restored_a_part_goes_on_with_greater_steps_only",
    ),
    "proof by the root": Mechanism(
        without="A commit counts as verified that was read from copies on local disks.",
        symbol="stepkeeper.restore.latest:LatestRestore._note_restored",
        instead=note_whatever_was_read,
        test="tests/integration/test_manager_tier.py::test_a_restore_reads_none_of_the_roots_data",
    ),
    # Deleting
    "branches": Mechanism(
        without="A process that restored nothing commits lower steps on the line of what was there.",
        symbol="stepkeeper.log.claims:must_branch",
        instead=answer(value=False),
        test="tests/property/test_storage_model.py::"
        "test_no_schedule_breaks_an_invariant[a-process-that-restored-nothing]",
    ),
    "newest verified": Mechanism(
        without="Retention deletes the last commit that was verified.",
        symbol="stepkeeper.retention.deletable:choose_deletable",
        instead=take_all_for_verified,
        test=f"{_LOG_LINES}::test_of_commits_only_those_go",
    ),
    "abandoned branches": Mechanism(
        without="Retention deletes an abandoned branch before the line has come as far.",
        symbol="stepkeeper.retention.deletable:_is_passed",
        instead=answer(value=True),
        test=f"{_LOG_LINES}::test_of_commits_only_those_go",
    ),
    "entry before deletion": Mechanism(
        without="Data is deleted while the log still calls its commit live.",
        symbol="stepkeeper.log.log:Log.delete",
        instead=delete_data_first,
        test=f"{_CUT}[deleting]",
    ),
    "pins": Mechanism(
        without="Data is deleted that a reader has pinned.",
        symbol="stepkeeper.retention.garbage:drop_over",
        instead=answer(SimpleNamespace(slots=frozenset(), over=())),
        test=f"{_GARBAGE}::test_what_is_pinned_keeps_its_data_until_its_last_pin_is_gone",
    ),
    "lease": Mechanism(
        without="Data is deleted whose holder renewed its pin while a collection removed it.",
        symbol="stepkeeper.retention.leases:pinned_slots",
        instead=answer(frozenset[int]()),
        test="tests/unit/runtime/test_pin_leases.py::test_who_renews_while_its_pin_is_removed_keeps_its_data",
    ),
    "age of garbage": Mechanism(
        without="A collection deletes what a process is writing.",
        symbol="stepkeeper.retention.garbage:_garbage",
        instead=lambda garbage: lambda state, _, listed: garbage(state, 1 << 30, listed),
        test=f"{_GARBAGE}::test_garbage_of_earlier_claims_goes_and_nothing_else",
    ),
    # Ends of waits
    "end of a rank": Mechanism(
        without="Ranks wait for one whose process has ended.",
        symbol="stepkeeper.coordination.peer_links:PeerLinks._listen",
        instead=overlook_ends,
        test="tests/unit/runtime_process/test_rank_groups.py::test_a_rank_that_ends_is_lost",
    ),
    "standstill of a rank": Mechanism(
        without="Ranks wait for one that hangs.",
        symbol="stepkeeper.coordination.store_rank_group:StoreRankGroup._is_silent",
        instead=answer(value=False),
        test="tests/unit/runtime_process/test_rank_groups.py::test_a_rank_that_stands_still_in_a_save_is_missed_soon",
    ),
    "end of a trainer": Mechanism(
        without="A companion outlives its trainer while a forked child holds the socket.",
        symbol="stepkeeper.companion.channel:Channel.receive",
        instead=lambda receive: lambda channel, _=None: receive(channel),
        test="tests/integration/test_manager_process.py::"
        "test_a_companion_is_gone_with_its_trainer_though_a_forked_child_has_its_socket",
        hangs=True,
    ),
    "time of a notice": Mechanism(
        without="A call keeps waiting after a notice's deadline.",
        symbol="stepkeeper.coordination.waits:Waits.check",
        instead=lambda _: lambda waits, _since_s: waits.raise_loss(),
        test="tests/unit/runtime_process/test_waits.py::test_a_wait_ends_with_the_notices_time_and_says_so",
        hangs=True,
    ),
    "silence of a store": Mechanism(
        without="A restore waits for a store that sends nothing.",
        symbol="stepkeeper.coordination.waits:SilenceLimit.is_over",
        instead=answer(value=False),
        test="tests/unit/runtime_process/test_time_limits.py::test_a_restore_that_gets_nothing_ends",
        hangs=True,
    ),
}
"""By name."""

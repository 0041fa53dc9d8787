"""Failures of the storage, 78 to 90: rows as in `table`."""

from __future__ import annotations

from typing import Final

from tests.known_bugs.table import Row

SAVE: Final = "coordinator/test_save.py::test_"
OPS: Final = "coordinator/test_operations.py::test_"
JOURNAL: Final = "coordinator/test_journal.py::test_"
STORE: Final = "coordinator/test_snapshots.py::test_"
STORAGE: Final = "coordinator/test_snapshots_storage.py::test_"
RETENTION: Final = "coordinator/test_snapshots_retention.py::test_"
SNAPSHOTS: Final = "known_bugs/test_bad_snapshots.py::test_"
SIMULATED: Final = "simulation/test_simulation.py::test_"

STORAGE_ROWS: Final = (
    Row("78", "the disk is full while everybody exports",
        "The save fails before it is acknowledged and leaves nothing; everybody opens, which needs no disk.",
        (f"{SAVE}a_full_disk_at_the_manifest_is_a_clean_abort", f"{STORE}a_failing_disk_publishes_nothing")),
    Row("79", "the disk is full for the journal",
        "Nothing begins without a reserve on the disk; what has begun ends with it, and a start on a full disk can abort.",
        (f"{SAVE}a_full_disk_at_the_journal_pauses_nobody",
         f"{JOURNAL}on_a_full_disk_what_has_begun_ends_with_the_reserve_and_nothing_new_begins",
         f"{JOURNAL}a_coordinator_starts_on_a_full_disk_so_that_it_can_abort",
         f"{STORAGE}a_full_disk_does_not_keep_a_coordinator_from_its_root")),
    Row("80", "fsync fails",
        "The file counts as lost and is not synced again; after one of the journal nothing is acknowledged, and it stops.",
        (f"{JOURNAL}after_a_failed_fsync_nothing_more_is_acknowledged", f"{STORE}a_failing_disk_publishes_nothing",
         f"{SIMULATED}no_invariant_is_violated")),
    Row("81", "a write is short, or fails half-way",
        "What is not whole is cut back or never named, and nobody is told that it is there.",
        (f"{JOURNAL}a_full_disk_leaves_no_torn_line_behind", f"{STORE}a_failing_disk_publishes_nothing")),
    Row("82", "a manifest is torn by a power loss",
        "Length and digest come before the body: it is no snapshot, and the one before it stands.",
        (f"{STORE}any_damage_is_refused_with_a_reason_and_without_a_change",
         f"{SNAPSHOTS}a_crash_at_any_write_of_a_save_and_its_pruning_leaves_a_whole_snapshot")),
    Row("83", "a bit of a file has changed",
        "The whole restore is refused before anybody is asked, the file is named, and `latest` takes an older one.",
        (f"{STORE}any_damage_is_refused_with_a_reason_and_without_a_change",
         f"{SNAPSHOTS}a_bad_snapshot_is_refused_with_what_to_do_and_nothing_changes")),
    Row("84", "a bit of a manifest has changed",
        "As 82. There is no pointer to lose: the newest snapshot is found by reading every manifest.",
        (f"{STORE}any_damage_is_refused_with_a_reason_and_without_a_change",
         f"{STORE}newest_first_and_what_is_no_snapshot_is_listed_with_why")),
    Row("85", "a file is cut, missing, or too many",
        "The manifest lists the exact files: what is missing or different refuses, what is not listed is named and unread.",
        (f"{STORE}any_damage_is_refused_with_a_reason_and_without_a_change",
         f"{STORE}whatever_is_added_is_named_and_changes_nothing_of_what_is_verified")),
    Row("86", "a file system without atomic names",
        "A probe at the start tries what publishing rests on; a root that cannot do it is refused before anybody is paused.",
        (f"{STORAGE}a_file_system_that_cannot_hold_snapshots_is_found_at_the_start",
         f"{STORAGE}a_file_system_whose_link_replaces_is_found_at_the_start",
         f"{STORAGE}the_probe_leaves_nothing_and_removes_what_one_before_left")),
    Row("87", "another machine sees files late",
        "What should be there is looked for again within 3 s, and then named; digests decide what it is.",
        (f"{STORAGE}parts_that_another_machine_wrote_are_waited_for_a_little",
         f"{STORAGE}a_part_that_never_comes_is_waited_for_within_bounds_and_named",
         "coordinator/test_sweeping.py::test_a_chunk_that_another_machine_wrote_is_waited_for_a_little",
         f"{STORAGE}a_shim_looks_again_for_a_directory_that_the_coordinator_has_just_made")),
    Row("88", "what an interrupted save left",
        "No directory is used again, and a start deletes leavings, after it has made sure that they cannot be published.",
        (f"{STORE}a_directory_is_reserved_once", f"{RETENTION}leavings_of_a_crash_are_swept_and_can_never_be_published",
         f"{RETENTION}a_start_sweeps_what_a_crash_left")),
    Row("89", "retention meets a restore",
        "What is restored, pinned or the last that verifies is never pruned, and a prune follows a durable publish only.",
        (f"{OPS}a_snapshot_that_is_being_restored_is_not_pruned",
         f"{RETENTION}a_pin_outlives_the_coordinator_and_every_prune_until_it_is_taken_away",
         f"{RETENTION}when_no_newer_one_verifies_the_newest_that_does_is_spared",
         f"{SNAPSHOTS}a_crash_at_any_write_of_a_save_and_its_pruning_leaves_a_whole_snapshot")),
    Row("90", "two jobs, one root", "The root says whose it is; a coordinator of another job does not start in it.",
        (f"{STORE}the_root_of_another_job_is_refused", f"{STORE}a_snapshot_of_another_job_or_name_is_refused")),
)  # fmt: skip

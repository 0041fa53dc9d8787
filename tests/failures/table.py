"""What Safepoint must survive: each failure, the rule in one sentence, and who holds it.

The rule: a row names tests that exist, or gives one honest sentence why there is none. `docs/failures.md` is rendered
from here. A test is a node id below tests/; one that ends in .txt is a scenario of the pure core, which lists every
effect. Storage has a table of its own, `storage.py`.
"""

from __future__ import annotations

from typing import Final

from tests.failures.storage import STORAGE_ROWS
from tests.known_bugs.table import Row

SCENARIO: Final = "protocol/scenarios/"
PARTICIPANTS: Final = "failures/test_participants.py::test_"
MESSAGES: Final = "failures/test_messages.py::test_"
SAVE: Final = "coordinator/test_save.py::test_"
OPS: Final = "coordinator/test_operations.py::test_"
RECOVERY: Final = "coordinator/test_recovery.py::test_"
PARTS: Final = "coordinator/test_parts.py::test_"
JOURNAL: Final = "coordinator/test_journal.py::test_"
MANIFEST: Final = "coordinator/test_manifest_file.py::test_"
STORE: Final = "coordinator/test_snapshots.py::test_"
SHIM: Final = "shims/test_service.py::test_"
FENCE: Final = "shims/test_fence.py::test_"
ADAPTER: Final = "shims/test_gym_adapter.py::test_"
PROCESS: Final = "shims/test_shim_process.py::test_"
REGISTER: Final = "shims/test_registration.py::test_"
DOORS: Final = "gate/test_admission.py::test_"
GATE: Final = "gate/test_rollouts.py::test_"
GATED: Final = "gate/test_processes.py::test_"
CORE: Final = "protocol/test_any_interleaving.py::test_"
CLIENT: Final = "client/test_save_and_restore.py::test_"
REPLIES: Final = "client/test_lost_replies.py::test_"
CUT: Final = "client/test_cut.py::test_"
WIRE: Final = "wire/test_rpc.py::test_"
TERMS: Final = "wire/test_terms_and_reasons.py::test_"
RECORD: Final = "wire/test_record.py::test_"
REQUESTS: Final = "known_bugs/test_bad_requests.py::test_"
SNAPSHOTS: Final = "known_bugs/test_bad_snapshots.py::test_"
MISSING: Final = "known_bugs/test_missing_participants.py::test_"
SIMULATED: Final = "simulation/test_simulation.py::test_"
HOSTILE: Final = "state/test_hostile.py::test_"
ACCESS: Final = "security/test_access.py::test_"
NODE_LOSS: Final = "ray/test_node_loss.py::test_a_save_survives_the_loss_of_the_coordinators_node_in"
RESTORE_LOSS: Final = "ray/test_node_loss.py::test_a_restore_survives_the_loss_of_the_coordinators_node_while_it_is"
TWO: Final = "ray/test_two_at_once.py::test_"
FILES: Final = "ray/test_other_files.py::test_"
TRAINERS: Final = "ray/test_trainers.py::test_"

MESSAGE_ROWS: Final = (
    Row("1", "a request is lost", "It is made again within the budget of its phase; whoever was not reached is still open.",
        (f"{SCENARIO}lost_request.txt", f"{SIMULATED}no_invariant_is_violated")),
    Row("2", "a reply is lost", "The repeat gets the recorded reply, closes nobody twice and extends no lease.",
        (f"{SAVE}a_lost_reply_is_asked_for_again_and_nothing_runs_twice",
         f"{FENCE}every_call_of_the_owner_renews_but_repeats_of_the_grant_do_not")),
    Row("3", "a commit comes twice", "The second one gets the same manifest; nothing is exported again.",
        (f"{SHIM}commit_writes_files_then_a_manifest_and_repeats_answer_the_same",)),
    Row("4", "one id, two requests", "A conflict that shows both digests, and no change.",
        (f"{OPS}the_same_id_with_other_parameters_is_a_conflict_that_shows_both_digests",
         f"{SHIM}a_repeated_prepare_with_other_parameters_is_a_conflict_with_both_digests")),
    Row("5", "commit before prepare", "It is refused and not remembered.",
        (f"{SHIM}commit_before_prepare_is_refused_and_not_remembered",
         f"{FENCE}a_phase_before_prepare_is_refused_and_not_remembered")),
    Row("6", "prepare after its abort", "It is refused, and admission stays open.",
        (f"{FENCE}an_end_of_an_unknown_operation_is_accepted_and_fences_it", f"{SCENARIO}late_prepared_after_abort.txt")),
    Row("7", "abort of what nobody has seen", "It is OK, and what it names is fenced.",
        (f"{SHIM}resume_and_abort_of_an_unknown_operation_are_accepted_and_fence_it",)),
    Row("8", "resume twice, or when open", "It is OK and changes nothing.",
        (f"{SHIM}resume_answers_the_same_each_time_and_releases_once",
         f"{OPS}resume_of_nothing_is_ok_when_idle_and_fenced_when_not")),
    Row("9", "Prepared comes after the abort", "It decides nothing; whoever sent it is told to open again.",
        (f"{SCENARIO}late_prepared_after_abort.txt", f"{SCENARIO}slow_drain.txt")),
    Row("10", "Committed comes after the abort", "Its files go, and no manifest ever names them.",
        (f"{SHIM}abort_overtakes_an_export_and_discards_it", f"{FENCE}a_phase_that_ends_after_its_operation_is_void")),
    Row("11", "a reply to a call of an earlier coordinator", "A reply belongs to one call of one process; any other is ignored by name.",
        (f"{SCENARIO}repeats.txt", f"{RECOVERY}an_operation_of_an_older_coordinator_is_refused_everywhere")),
    Row("12", "an older process of the server answers", "Its incarnation is another one: it counts as restarted.",
        (f"{SCENARIO}changed_incarnation_in_a_reply.txt", f"{PARTS}a_static_participant_that_was_restarted_or_is_gone_is_told",
         f"{PARTICIPANTS}one_that_is_replaced_so_fast_that_its_port_answers_voids_the_cut")),
    Row("13", "a stream is cut in the middle", "It is asked again; a stream without its last message is never complete.",
        (f"{PARTICIPANTS}a_stream_that_breaks_after_its_first_word_is_asked_again_and_never_taken_for_its_end",
         f"{REPLIES}a_stream_that_ends_well_without_its_result_is_no_success")),
    Row("14", "the deadline passed and it was done", "Unknown means applied: look, then abort or repeat under the same id.",
        (f"{CUT}a_publish_of_unknown_effect_is_resumed_when_it_was_done",
         f"{CUT}a_publish_of_unknown_effect_is_aborted_when_it_was_not_done",
         f"{TRAINERS}a_connection_that_breaks_during_commit_ends_nothing_and_the_trainer_learns_the_truth")),
    Row("15", "the connection breaks after bytes were sent", "As 14.",
        (f"{WIRE}nobody_there_means_unanswered_and_not_refused", f"{CUT}a_lost_publish_reply_is_repeated")),
    Row("16", "a handler outlives its caller", "The phase goes on, is still fenced, and its result is recorded or thrown away.",
        (f"{SHIM}a_cancelled_prepare_goes_on_and_a_repeat_follows_it", f"{SHIM}commit_is_refused_after_the_lease_lapsed")),
    Row("17", "an error with too much in it", "The code survives: details stay under 4 KiB, the rest is in the status.",
        (f"{WIRE}900_rollouts_neither_replace_the_status_nor_pass_4_kib",
         f"{SAVE}nine_hundred_stuck_rollouts_keep_the_status_code")),
    Row("18", "bytes that are no request", "They are refused, change nothing, and the connection stays.",
        (f"{MESSAGES}bytes_that_are_no_request_change_nothing_and_the_connection_stays",
         f"{SHIM}malformed_requests_change_nothing")),
    Row("19", "everybody tries again at once", "Tries are spread by chance, grow rare and end with a budget.",
        (f"{MESSAGES}the_tries_of_a_thousand_trainers_are_spread_by_chance_and_bounded_by_their_budget",
         f"{MESSAGES}the_tries_of_a_thousand_shims_are_spread_by_chance_and_grow_rare",
         f"{MESSAGES}calls_to_a_participant_are_repeated_a_few_times_with_growing_gaps")),
)  # fmt: skip

TIME_ROWS: Final = (
    Row("20", "clocks that differ by an hour", "Durations travel, never a time of day: no decision depends on it.",
        (f"{SIMULATED}no_decision_depends_on_the_wall_clock",)),
    Row("21", "a clock that jumps", "Leases run on the monotonic clock, which goes on while a process is stopped.",
        (f"{SIMULATED}no_decision_depends_on_the_wall_clock",
         f"{SHIM}a_stopped_process_finds_its_lease_lapsed_before_it_acts")),
    Row("22", "a participant that slept past its lease", "It looks at its lease before it does anything, and refuses.",
        (f"{SHIM}a_stopped_process_finds_its_lease_lapsed_before_it_acts",
         f"{DOORS}a_process_that_was_stopped_past_its_lease_opens_before_it_decides",
         f"{FENCE}a_call_that_finds_its_lease_lapsed_is_refused_and_says_that_admission_must_open")),
    Row("23", "a coordinator that slept past the deadline",
        "It publishes only while every lease is known to run and its epoch is the newest, looked at right before the link.",
        (f"{SAVE}no_lease_no_snapshot", f"{RECOVERY}an_older_coordinator_cannot_publish",
         f"{CORE}a_coordinator_that_slept_through_everything_still_tells_everybody",
         f"{STORE}publishing_is_forbidden_right_before_the_link", f"{SCENARIO}lease_lapsed_at_confirm.txt")),
    Row("24", "no time left on arrival", "It is refused before any effect.",
        (f"{REQUESTS}a_deadline_that_has_passed_changes_nothing", f"{OPS}too_little_time_pauses_nobody")),
    Row("25", "a server that waits as long as its caller", "It ends its own wait first, and says who is waited for.",
        (f"{TERMS}a_server_always_ends_its_wait_before_its_caller",
         f"{SHIM}prepare_that_does_not_drain_names_who_is_stuck_before_the_deadline")),
    Row("26", "the lease's timer fires with the resume", "A timer knows its operation and generation: later it is a no-op.",
        (f"{SHIM}a_timer_that_fires_after_resume_is_a_no_op", f"{FENCE}a_timer_of_an_older_lease_is_a_no_op",
         f"{DOORS}a_timer_of_an_earlier_closing_does_not_open_a_later_one")),
    Row("27", "the first phase eats all the time", "A reserve outside the deadline is kept for opening everybody.",
        (f"{SCENARIO}time_is_over_between_waves.txt", f"{SCENARIO}storage_hangs.txt",
         f"{SAVE}a_participant_that_hangs_in_prepare_is_named_in_time_and_the_others_open")),
)  # fmt: skip

CRASH_ROWS: Final = (
    Row("28", "before anything is durable", "Nobody has heard of it; the same operation may begin anew.",
        (f"{PARTICIPANTS}a_crash_before_anything_was_recorded_leaves_nothing_and_the_same_operation_may_begin",)),
    Row("29", "after the intent is recorded", "Presumed abort: everybody who is named there is told.",
        (f"{SCENARIO}crash_before_publish.txt", f"{CORE}what_is_recorded_is_what_a_new_coordinator_finds")),
    Row("30", "in the middle of prepare", "Everybody is told Abort, and whoever never saw it fences it.",
        (f"{RECOVERY}a_crash_before_publishing_aborts_and_the_next_save_works", NODE_LOSS)),
    Row("31", "when all are prepared", "Abort: whether the freeze held is not known any more.",
        (f"{PARTICIPANTS}a_crash_while_all_stand_still_before_publish_aborts_and_goes_on_with_nothing",)),
    Row("32", "in the middle of commit", "Abort, and what was written is deleted.",
        (f"{RECOVERY}a_crash_before_publishing_aborts_and_the_next_save_works", NODE_LOSS)),
    Row("33", "when all have committed", "Abort.",
        (f"{PARTICIPANTS}a_crash_while_all_stand_still_before_publish_aborts_and_goes_on_with_nothing",)),
    Row("34", "before the manifest has its name", "Abort; the half-written file is deleted.",
        (f"{RECOVERY}a_crash_in_the_middle_of_publishing_believes_the_disk", NODE_LOSS,
         f"{SNAPSHOTS}a_crash_at_any_write_of_a_save_and_its_pruning_leaves_a_whole_snapshot")),
    Row("35", "before the directory is durable", "Either may be: the disk is read, and it decides.",
        (f"{SCENARIO}crash_while_publishing.txt", f"{SIMULATED}no_invariant_is_violated")),
    Row("36", "published and not resumed", "Resume; never abort what is published.",
        (f"{RECOVERY}a_crash_after_publishing_resumes", f"{SCENARIO}crash_after_publish.txt", NODE_LOSS)),
    Row("37", "in the middle of resume", "Everybody is told again until it has answered or its lease has freed it.",
        (f"{SCENARIO}resume_hangs.txt", f"{SAVE}a_participant_that_hangs_in_resume_is_listed_and_the_save_stands", NODE_LOSS)),
    Row("38", "in the middle of a restore", "Who has closed stays paused; repeat it or abort it, never half open. "
        "One that was loaded everywhere can be resumed, also after leases have opened everybody.",
        (f"{SCENARIO}crash_in_restore.txt", f"{SCENARIO}restore_outlives_its_coordinator_and_the_lease.txt",
         f"{RECOVERY}a_restore_that_was_loaded_stays_paused_over_a_restart",
         f"{RECOVERY}a_restore_whose_coordinator_was_gone_for_longer_than_the_lease_can_still_be_resumed", RESTORE_LOSS)),
    Row("39", "again and again",
        "Each start raises the epoch before it calls anybody, and is usable at once however many participants hang.",
        (f"{TWO}a_coordinator_that_crashes_again_and_again_raises_its_epoch_each_time_and_serves_in_the_end",
         f"{JOURNAL}each_start_has_a_higher_epoch_and_knows_what_came_before",
         f"{PARTICIPANTS}a_start_is_usable_within_a_second_however_many_participants_hang")),
    Row("40", "started again where its files are not", "It does not act without its log, says so, and goes elsewhere.",
        (f"{RECOVERY}a_coordinator_that_has_run_before_refuses_to_act_where_its_log_is_not",
         f"{FILES}a_coordinator_refuses_to_act_on_a_node_with",
         f"{JOURNAL}where_a_coordinator_has_been_a_missing_journal_is_no_empty_one",
         f"{JOURNAL}a_journal_that_was_cut_below_what_it_was_made_with_is_refused",
         f"{JOURNAL}damage_in_the_middle_stops_the_coordinator")),
    Row("41", "a method that Ray runs twice", "The second run attaches to the first, by the operation_id.",
        (f"{TRAINERS}a_method_of_the_trainers_actor_that_ray_runs_again_attaches_to_the_first_run",
         f"{OPS}a_repeat_gets_the_recorded_outcome_and_nobody_is_called")),
)  # fmt: skip

TWO_ROWS: Final = (
    Row("42", "the old one lives behind a partition", "Participants serve the highest epoch they have seen, and the old one ends.",
        (f"{FENCE}an_older_epoch_is_refused_whatever_it_asks_and_changes_nothing",
         f"{RECOVERY}an_operation_of_an_older_coordinator_is_refused_everywhere",
         f"{TWO}one_of_the_same_name_in_another_namespace_replaces_it_in_the_middle_of_a_save")),
    Row("43", "both publish", "Who makes the manifest's name first has decided, and the newer epoch takes the name away before it aborts.",
        (f"{RECOVERY}an_older_coordinator_cannot_publish",
         "simulation/test_regressions.py::test_a_snapshot_that_was_given_up_is_never_published")),
    Row("44", "two servers on one port", "The second one does not start.", (f"{RECOVERY}a_taken_port_is_refused",)),
    Row("45", "a second shim takes the socket", "One life has one shim, by a lock; each reply's incarnation is checked.",
        (f"{PROCESS}a_shim_process_serves_is_alone_and_opens_when_it_goes",
         f"{SHIM}confirm_proves_the_freeze_and_refuses_another_incarnation")),
    Row("46", "an old answer of who is the owner", "The highest epoch that was ever seen counts; an older coordinator is left again.",
        (f"{REGISTER}it_does_not_stay_with_a_coordinator_older_than_one_it_has_had",
         f"{RECORD}a_call_that_was_found_by_the_record_of_another_coordinator_is_refused_before_anything_is_done",
         f"{FENCE}a_higher_epoch_takes_over_and_the_old_operation_is_finished")),
    Row("47", "two operations at once", "One runs; the other is told which.",
        (f"{OPS}a_second_operation_is_fenced_and_told_whose_turn_it_is",
         f"{OPS}twenty_saves_at_once_make_one_winner")),
)  # fmt: skip

PARTICIPANT_ROWS: Final = (
    Row("48", "dead before prepare", "It is found before anybody is paused, and named.",
        (f"{MISSING}a_save_without_somebody_who_was_here_is_refused_and_names_it",
         f"{SAVE}a_static_participant_takes_part_and_its_absence_is_found_before_anything_is_paused")),
    Row("49", "dies after prepare",
        "The cut is void, and the others open at once; so does its server when the next shim has been told, else by its lease.",
        (f"{PARTICIPANTS}one_that_dies_in_a_phase_voids_the_cut_at_once_and_the_others_open",
         f"{SAVE}a_dead_participant_ends_the_wait",
         "shims/test_killed_shim.py::test_its_successor_opens_the_server_long_before_the_lease_would",
         "shims/test_killed_shim.py::test_without_a_coordinator_the_successor_leaves_it_closed_for_the_lease")),
    Row("50", "dies while it exports", "As 49; what it wrote is deleted with the cut.",
        (f"{PARTICIPANTS}one_that_dies_in_a_phase_voids_the_cut_at_once_and_the_others_open",)),
    Row("51", "dies after its commit, before publish", "The cut is void, for every role, although its files are whole.",
        (f"{PARTICIPANTS}one_that_dies_after_its_commit_and_before_publish_voids_the_cut",)),
    Row("52", "dies after publish, before resume", "The snapshot stands; it comes back open.",
        (f"{PARTICIPANTS}one_that_dies_after_publish_changes_nothing_and_comes_back_open",
         f"{SCENARIO}participant_dies_after_publish.txt")),
    Row("53", "restarted so fast that its port answers", "Its incarnation gives it away: the cut is void.",
        (f"{PARTICIPANTS}one_that_is_replaced_so_fast_that_its_port_answers_voids_the_cut",
         f"{SCENARIO}changed_incarnation.txt")),
    Row("54", "a worker of it dies", "The set of workers has changed: it declines.",
        (f"{ADAPTER}a_worker_that_dies_while_closed_voids_the_cut",
         f"{ADAPTER}a_worker_that_was_replaced_while_closed_voids_the_cut")),
    Row("55", "a worker has not answered", "Every configured worker acknowledges, or it is an error and never a zero.",
        (f"{SAVE}a_worker_that_does_not_acknowledge_fails_the_prepare",
         f"{ADAPTER}a_missing_worker_is_an_error_with_its_name_and_nothing_stays_closed")),
    Row("56", "a proof that is a lie", "Names, incarnation, paths and digests are checked; it can only void the cut.",
        (f"{SAVE}a_participant_that_lies_can_only_void_the_cut", f"{SCENARIO}foreign_manifest.txt")),
    Row("57", "declines", "The operation ends at once, with its reason.",
        (f"{SAVE}a_decline_ends_it_at_once", f"{SCENARIO}decline.txt")),
    Row("58", "is slow",
        "It and its rollouts are named each second while it lasts, in a warning at half and four fifths of the time, and in the error.",
        (f"{SHIM}progress_comes_within_a_second_and_each_second", f"{SCENARIO}slow_drain.txt",
         "coordinator/test_reporting.py::test_half_and_four_fifths_of_the_time_are_told_once_with_who_is_waited_for",
         f"{SAVE}a_drain_that_does_not_end_names_rollout_participant_turn_and_time")),
    Row("59", "a rollout that never ends", "It is excluded by name after a grace, or the cut ends and everybody opens.",
        (f"{SHIM}stragglers_are_excluded_before_the_deadline", f"{GATE}stragglers_are_excluded_by_name_with_what_they_wait_for",
         f"{SCENARIO}stragglers_fail.txt")),
    Row("60", "ignores abort", "Its lease frees it; until then the next save is refused and names it.",
        (f"{PARTICIPANTS}one_that_says_it_has_opened_and_has_not_refuses_the_next_save_by_name_and_its_lease_frees_it",
         f"{SAVE}an_abort_that_is_not_confirmed_is_said_to_be")),
    Row("61", "answers status and does nothing", "A phase ends with its deadline whatever status says.",
        (f"{SAVE}one_that_never_commits_prevents_the_snapshot",
         f"{ADAPTER}status_answers_while_a_workers_loop_is_busy_and_so_does_the_rest",
         f"{SCENARIO}commit_takes_too_long.txt")),
    Row("62", "an engine that fails while paused", "It declines with the reason; restarted it is another incarnation.",
        (f"{SCENARIO}engine_dies_in_prepare.txt",)),
    Row("63", "ranks that have not paused", "Paused is what every rank has acknowledged.",
        ("vllm/test_ranks.py::test_one_pause_freezes_every_rank_and_all_go_on_exactly",)),
    Row("64", "a judge that is labelled policy", "It is refused before anything is paused, with the role to set.",
        (f"{SAVE}a_judge_that_is_labelled_policy_is_refused_before_anything_is_paused",
         f"{SCENARIO}judge_mislabelled.txt")),
)  # fmt: skip

MEMBERSHIP_ROWS: Final = (
    Row("65", "somebody joins during a cut", "It is not part of it; unless it is auxiliary the cut is void.",
        (f"{SAVE}whoever_joins_while_a_save_runs_voids_it",)),
    Row("66", "somebody leaves during a cut", "The cut is void, unless it was auxiliary.",
        (f"{PARTICIPANTS}one_that_dies_in_a_phase_voids_the_cut_at_once_and_the_others_open", f"{SCENARIO}judge_dies.txt")),
    Row("67", "a heartbeat runs out while it is waited for", "The loss ends the wait.",
        (f"{SAVE}a_silent_participant_is_lost_after_three_heartbeats",)),
    Row("68", "the topology changed since it was looked at", "Membership is what it is when the operation begins; another fingerprint than the expected one is refused.",
        (f"{SAVE}a_topology_that_is_refused_reserves_nothing_on_the_disk",
         f"{OPS}another_topology_is_refused_with_the_difference_and_nobody_is_paused")),
    Row("69", "one name at two addresses", "The second one is refused while the first one lives.",
        (f"{OPS}a_second_living_shim_of_one_name_is_refused", f"{REQUESTS}a_duplicate_server_name_names_the_one_that_is_there",
         f"{REQUESTS}two_shims_of_one_address_are_found")),
    Row("70", "all agents are replaced", "One cause is named; when they stay away one problem has all their names.",
        (f"{PARTICIPANTS}all_agents_replaced_at_once_is_one_cause_while_a_save_runs_and_none_before_the_next",
         f"{PARTICIPANTS}several_that_are_gone_for_good_are_one_problem_that_names_them_all")),
)  # fmt: skip

NETWORK_ROWS: Final = (
    Row("71", "requests arrive, replies do not", "As 2 and 14; in the end the lease opens.",
        (f"{SAVE}a_lost_reply_is_asked_for_again_and_nothing_runs_twice", f"{SIMULATED}no_invariant_is_violated")),
    Row("72", "requests do not arrive", "Prepare fails, and the others open.",
        (f"{SCENARIO}lost_request.txt", f"{SIMULATED}no_invariant_is_violated")),
    Row("73", "a partition heals after the lease", "What it brings is refused; nobody is closed again.",
        (f"{FENCE}the_lease_lapses_at_its_time_and_later_calls_are_told", f"{SHIM}commit_is_refused_after_the_lease_lapsed")),
    Row("74", "bytes that trickle", "Every call has a deadline, every queue an end.",
        (f"{CLIENT}every_call_carries_a_deadline", f"{PARTS}a_slow_follower_loses_the_oldest_and_is_told",
         f"{SHIM}watch_sends_changes_at_once_and_the_newest_to_a_slow_reader")),
    Row("75", "a connection that is half there", "Heartbeats and pings notice it long before a phase ends.",
        (f"{MESSAGES}a_shim_whose_connection_is_only_half_there_is_lost_after_three_heartbeats",
         f"{MESSAGES}a_peer_that_vanished_is_noticed_long_before_a_phase_ends",
         f"{REGISTER}a_coordinator_that_falls_silent_counts_as_gone")),
    Row("76", "links that stop and return in any order", "All open, and the cut is published or aborted.",
        (f"{SIMULATED}no_invariant_is_violated", f"{SIMULATED}every_kind_of_fault_is_drawn")),
    Row("77", "an address that changes", "It is looked up at each try; who answers is held to the record, the token and the incarnation.",
        (f"{RECORD}a_call_that_was_found_by_the_record_of_another_coordinator_is_refused_before_anything_is_done",
         f"{RECORD}a_client_reads_the_record_again_when_another_coordinator_has_the_same_port",
         f"{REGISTER}it_finds_a_coordinator_that_moved", f"{OPS}an_abort_reaches_the_shim_that_replaced_one_that_had_restored")),
)  # fmt: skip

INPUT_ROWS: Final = (
    Row("91", "paths that lead out of a snapshot", "Only plain names and plain files, opened below a handle of the root.",
        (f"{MANIFEST}paths_with_other_than_plain_segments_are_unsafe", f"{MANIFEST}only_plain_files_are_read",
         f"{STORE}links_are_refused_and_nothing_changes", f"{SHIM}a_link_in_a_snapshot_is_refused")),
    Row("92", "too much of everything", "Bytes, entries, paths and depth have limits.",
        (f"{MANIFEST}walking_stops_at_its_limit", f"{MANIFEST}deep_nesting_is_refused",
         f"{HOSTILE}limits_hold_on_both_sides")),
    Row("93", "a bomb", "Nothing grows beyond what it declares.",
        (f"{HOSTILE}a_compressed_bomb_makes_no_more_than_it_declares",)),
    Row("94", "no credentials, wrong ones, or old ones", "It is refused before its request is read; what is old is fenced.",
        (f"{WIRE}without_the_token_every_method_is_refused_even_unknown_ones",
         f"{ACCESS}a_stranger_is_refused_before_a_byte_of_the_request_came",
         f"{RECOVERY}with_a_token_a_stranger_learns_nothing")),
    Row("95", "state of another job, server or format", "It is refused, and nothing is loaded.",
        (f"{STORE}a_snapshot_of_another_job_or_name_is_refused", f"{SHIM}state_of_another_kind_or_schema_is_refused",
         f"{HOSTILE}a_newer_format_is_named_so")),
    Row("96", "a flood", "Watchers are bounded and lose the oldest; abort, resume and status get through.",
        (f"{SHIM}watchers_do_not_starve_other_calls", f"{SHIM}watchers_are_bounded_and_give_their_place_back",
         f"{PARTS}a_slow_follower_loses_the_oldest_and_is_told",
         f"{OPS}status_and_abort_answer_within_a_second_whatever_is_stuck")),
)  # fmt: skip

SECTIONS: Final = {
    "B1. Messages": MESSAGE_ROWS,
    "B2. Time": TIME_ROWS,
    "B3. The coordinator dies": CRASH_ROWS,
    "B4. Two coordinators": TWO_ROWS,
    "B5. A participant fails": PARTICIPANT_ROWS,
    "B6. Membership": MEMBERSHIP_ROWS,
    "B7. Network": NETWORK_ROWS,
    "B8. Storage": STORAGE_ROWS,
    "B9. Hostile or oversized input": INPUT_ROWS,
}
ROWS: Final = tuple(row for rows in SECTIONS.values() for row in rows)
NUMBERS: Final = [str(n) for n in (*range(1, 78), *range(91, 97))]  # storage brings its own

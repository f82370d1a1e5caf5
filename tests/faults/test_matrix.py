"""The fault matrix: every fault that a run must survive, and the tests that prove it, each where it belongs.

`pytest $(python -m tests.faults.test_matrix)` runs them all.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    fault: str
    holds: str
    """What must be so."""
    tests: tuple[str, ...]
    """`file::test`, below tests/."""
    on_nodes: tuple[str, ...] = ()
    """Of several nodes: whole runs on those of `tests/nodes.py`, some of them in `make test-all` alone."""


MATRIX = {
    1: Row(
        "kill -9 during a save, at random moments, synchronous and asynchronous",
        "the newest good checkpoint loads; the resumed run is bitwise the one that was not killed",
        (
            "checkpoint/test_faults.py::test_kill_9_at_any_moment_leaves_a_good_checkpoint",
            "run/test_kills.py"
            "::test_a_run_killed_in_its_saves_at_20_random_moments_ends_bit_for_bit_as_if_it_had_not",
            "checkpoint/test_layouts.py::test_a_sharded_model_resumed_is_bitwise_the_uninterrupted_one",
        ),
    ),
    2: Row(
        "a kill between the rename and the purge",
        "both load",
        (
            "checkpoint/test_faults.py::test_a_kill_between_the_rename_and_the_purge_leaves_both",
            "checkpoint/test_save_load.py::test_a_kill_between_the_renames_loses_nothing",
            "checkpoint/test_checkpointer.py"
            "::test_what_does_not_verify_gets_no_name_and_nothing_is_purged_for_it",
        ),
    ),
    3: Row(
        "the disk is full",
        "the error names path, bytes needed and free; the run goes on; the last good one is untouched",
        (
            "checkpoint/test_faults.py::test_a_full_disk_leaves_the_last_good_one_and_the_run_goes_on",
            "checkpoint/test_faults.py::test_a_disk_without_room_is_told_before_anything_is_written",
            "checkpoint/test_layouts.py::test_a_failure_on_one_rank_is_told_on_all_and_the_run_goes_on",
            "run/test_checkpoint_settings.py::test_a_save_that_fails_ends_the_run_or_does_not",
            "run/test_ranks.py::test_a_full_disk_is_said_in_words_and_costs_no_checkpoint",
        ),
    ),
    4: Row(
        "a truncated, bit-flipped, zeroed, missing or extra file",
        "found, the file named; the last good checkpoint, or the store's copy, is taken, said in one line",
        (
            "checkpoint/test_faults.py::test_any_harm_is_found_the_file_named_and_the_one_before_taken",
            "checkpoint/test_faults.py::test_an_extra_file_is_named",
            "checkpoint/test_layouts.py::test_damage_is_told_alike_on_every_rank",
            "run/test_checkpoint_settings.py"
            "::test_a_resume_names_the_bad_checkpoint_in_one_line_and_takes_the_last_good_one",
            "run/test_checkpoint_settings.py"
            "::test_ranks_that_start_anew_pass_over_a_bad_checkpoint_in_one_line",
            "run/test_remote.py::test_a_step_that_is_damaged_here_is_taken_from_the_store",
            "run/test_remote.py::test_all_ranks_take_the_stores_where_one_finds_damage",
            "cli/test_checkpoint.py::test_verify_reads_every_byte_and_exits_5",
        ),
    ),
    5: Row(
        "SIGTERM and SIGUSR1, to the launcher and to one rank",
        "saved within 30 s, exit code 75, nothing orphaned, the resumed run bitwise equal",
        (
            "run/test_ranks.py::test_a_signal_saves_and_leaves_with_its_own_code",
            "run/test_ranks.py::test_two_ranks_stopped_by_a_signal_resume_as_if_they_had_not",
            "run/test_ranks.py::test_a_signal_to_one_rank_stops_both_and_they_resume_as_if_they_had_not",
            "run/test_ranks.py::test_a_second_ctrl_c_leaves_at_once",
            "run/test_restarts.py::test_a_signal_to_one_rank_stops_all_with_a_checkpoint",
        ),
    ),
    6: Row(
        "a rank dies in the middle of a step, or of a save",
        "all ranks start anew by themselves; the run is bitwise the one where none died",
        (
            "run/test_restarts.py::test_a_run_whose_rank_died_is_bitwise_the_one_where_none_did",
            "run/test_ranks.py::test_a_rank_that_is_killed_is_named_and_a_restart_goes_on_from_the_checkpoint",
            "run/test_checkpoint_settings.py::test_ranks_that_start_anew_stay_on_the_way_that_was_chosen",
        ),
    ),
    7: Row(
        "a collective hangs",
        "flight recorder and stacks are written, all leave, one block says the cause",
        (
            "run/test_ranks.py"
            "::test_a_rank_that_hangs_is_told_in_one_block_with_its_stack_and_the_others_collectives",
        ),
    ),
    8: Row(
        "a NaN loss, an infinite gradient, a spike, on one rank only",
        "skipped on all ranks, weights unchanged, counted; so many in a row end the run",
        (
            "engine/test_guard.py::test_a_wrong_step_on_one_rank_is_skipped_on_all_and_counted",
            "engine/test_guard.py::test_fused_adamw_reads_nothing_to_the_host",
            "run/test_skipped_steps.py::test_too_many_in_a_row_end_the_run_with_the_weights_before_them",
            "run/test_skipped_steps.py::test_a_run_that_was_resumed_skips_what_the_whole_one_skips",
            "run/test_skipped_steps.py::test_two_ranks_stop_together_when_one_of_them_goes_wrong",
        ),
    ),
    9: Row(
        "bad rows: invalid UTF-8, empty, a 10 MB line, a missing key, cut JSON Lines",
        "skipped and counted, or under `strict` an error with file and line",
        (
            "data/test_jsonl.py::test_a_bad_row_is_skipped_counted_and_told",
            "data/test_jsonl.py::test_where_strict_a_bad_row_is_an_error_with_file_and_line",
            "run/test_bad_rows.py::test_a_run_skips_bad_rows_tells_of_them_and_counts_them",
            "run/test_bad_rows.py::test_a_strict_run_ends_at_the_first_with_its_file_and_line",
            "data/test_parquet.py::test_what_cannot_be_read_is_named",
            "data/test_tokenize.py::test_a_truncated_compressed_file_is_an_error",
            "data/test_tokenize.py::test_damage_is_named_with_file_and_byte",
            "data/test_token_shards.py::test_truncated_shards_are_named_before_and_during_a_run",
            "data/test_token_shards.py::test_shards_of_another_index_are_found_before_the_first_step",
            "data/test_token_shards.py::test_what_is_not_of_the_format_is_named_with_its_byte",
            "data/test_token_shards.py::test_an_id_beyond_the_vocabulary_is_named_with_its_byte",
        ),
    ),
    10: Row(
        "the rendezvous store is lost",
        "a clear error, nothing orphaned, the run can be resumed",
        ("run/test_restarts.py::test_a_rendezvous_that_is_lost_is_told_and_the_run_can_be_resumed",),
    ),
    11: Row(
        "a resume on another layout: FSDP2, FSDP4, TP2, FSDP2 x TP2, PP2, one rank",
        "the same data order, and losses of the first 5 steps within 1e-5",
        (
            "run/test_layouts.py::test_a_run_goes_from_layout_to_layout_with_the_same_data_and_losses",
            "checkpoint/test_relayout.py::test_each_layout_goes_on_where_the_one_before_it_stopped",
            "checkpoint/test_layouts.py::test_every_layout_loads_on_every_other_bit_for_bit",
            "parallel/test_expert_checkpoints.py::test_every_spread_of_experts_goes_on_from_every_other",
            "data/test_packing.py::test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing",
        ),
    ),
    12: Row(
        "hostile files: crafted metadata, pickles, Hugging Face .bin",
        "refused, and nothing is executed",
        (
            "checkpoint/test_format.py::test_a_hostile_header_is_refused",
            "checkpoint/test_format.py::test_a_hostile_layout_is_refused",
            "checkpoint/test_format.py::test_a_pickle_beside_it_is_named_and_never_opened",
            "checkpoint/test_format.py::test_a_layout_that_names_a_file_beside_the_manifest_is_refused",
            "checkpoint/test_hf.py::test_a_hostile_index_is_refused",
            "checkpoint/test_hf.py::test_pickled_weights_are_refused_with_the_way_out",
            "run/test_hostile.py::test_a_run_refuses_them_and_nothing_is_executed",
            "run/test_hostile.py::test_a_checkpoint_with_a_pickle_in_it_is_passed_over",
        ),
    ),
    13: Row(
        "two jobs on one run folder",
        "an error that names host and process",
        (
            "run/test_runs.py::test_a_run_folder_in_use_is_refused_naming_process_and_host",
            "run/test_train.py::test_a_run_folder_in_use_is_refused",
            "run/test_runs.py::test_ranks_that_outlive_their_command_still_hold_the_folder",
            "run/test_ranks.py::test_a_launcher_that_is_killed_leaves_no_rank_behind",
        ),
    ),
    14: Row(
        "a slow rank",
        "named in the metrics",
        (
            "run/test_slow_rank.py::test_a_rank_that_is_slower_is_named_in_the_metrics",
            "observe/test_observers.py::test_a_rank_that_stays_slow_is_named_once_in_words",
        ),
    ),
    15: Row(
        "another dataset, model or tokenizer on resume",
        "refused with the difference, unless told to go on",
        (
            "run/test_train.py::test_the_recipe_of_a_job_script_may_change_but_not_its_model_or_data",
            "run/test_train.py::test_other_data_are_begun_anew_where_drift_is_allowed",
            "run/test_drift.py::test_the_sections_that_give_a_checkpoint_its_meaning_are_guarded",
            "checkpoint/test_layouts.py::test_a_mismatch_is_told_alike_on_every_rank",
            "data/test_packing.py::test_a_state_of_other_data_or_another_tokenizer_or_seed_is_refused",
            "data/test_jsonl.py::test_other_rows_or_another_key_are_refused_on_resume",
            "data/test_fingerprint.py::test_an_edit_in_the_middle_of_a_large_corpus_is_noticed",
            "data/test_mix.py::test_other_data_or_weights_are_refused",
        ),
    ),
    16: Row(
        "a node is killed and a new one takes its place",
        "it joins, all go on from the newest good checkpoint, bitwise as if nothing had happened",
        ("run/test_several_nodes.py::test_a_node_that_is_lost_is_replaced",),
        (
            "run/test_several_nodes.py::test_a_node_that_is_lost_is_replaced",
            "run/test_several_nodes.py::test_a_node_that_freezes_is_replaced_and_comes_back_as_a_spare",
        ),
    ),
    17: Row(
        "a hot spare waits; a node is killed",
        "the spare takes over without a new job, whatever it was planned with",
        ("run/test_attempt.py::test_a_plan_from_before_another_attempt_is_brought_up_to_date",),
        (
            "run/test_several_nodes.py::test_a_hot_spare_takes_the_place_of_a_node_and_one_that_is_not_needed_ends_well",
        ),
    ),
    18: Row(
        "the node of rank 0 is lost, which serves the rendezvous",
        "the same as any other; the rendezvous moves",
        (
            "run/test_several_nodes.py::test_a_node_that_is_lost_is_replaced",
            "run/test_attempt.py::test_a_place_that_falls_silent_is_left_for_another_one",
            "run/test_attempt.py::test_two_that_begin_at_once_do_not_both_serve",
        ),
        ("run/test_several_nodes.py::test_a_node_that_is_lost_is_replaced",),
    ),
    19: Row(
        "the network is cut during a save",
        "no half checkpoint has a name; what was cut off saves nothing more",
        (
            "run/test_attempt.py::test_ranks_begin_an_attempt_and_continue_it_each_time_with_another_token",
            "run/test_attempt.py::test_a_lost_node_that_holds_the_folder_is_not_waited_for",
            "run/test_two_writers.py::test_the_claim_is_asked_again_right_before_the_rename",
        ),
        (
            "run/test_several_nodes.py::test_a_network_that_is_cut_during_a_save_leaves_no_half_of_one",
            "run/test_several_nodes.py::test_a_node_that_serves_and_is_cut_off_leaves_it_to_the_others",
            "run/test_elastic.py::test_an_old_side_that_is_cut_off_in_a_save_and_comes_back_writes_no_checkpoint",
        ),
    ),
    20: Row(
        "clocks differ by 20 s",
        "the first failure is named as the cause",
        ("run/test_failures.py::test_clocks_of_hosts_that_differ_do_not_change_the_cause",),
        (
            "run/test_faults_on_nodes.py::test_a_clock_that_is_minutes_off_neither_restarts_a_run_nor_hides_who_failed",
        ),
    ),
    21: Row(
        "a node's run folder is a local disk",
        "refused at the start",
        (
            "distributed/test_shared_folder.py::test_local_disks_are_named_by_their_hosts_on_every_rank",
            "distributed/test_shared_folder.py::test_a_folder_that_cannot_be_written_on_one_node_is_named",
        ),
        ("run/test_faults_on_nodes.py::test_local_disks_are_refused_at_the_start_by_their_names",),
    ),
    22: Row(
        "a node sees an older or damaged copy of a file",
        "every rank loads the same bytes, or none",
        (
            "checkpoint/test_layouts.py::test_a_bit_that_one_node_alone_sees_flipped_is_found",
            "checkpoint/test_layouts.py::test_a_node_with_a_stale_view_is_found",
        ),
        ("run/test_faults_on_nodes.py::test_nodes_with_different_views_of_a_checkpoint_load_the_same_one",),
    ),
    23: Row(
        "no working lock on the shared disk, two jobs",
        "one of them ends, nothing of the other's is deleted",
        (
            "run/test_two_writers.py::test_an_attempt_that_another_one_follows_saves_nothing_more_and_ends",
            "run/test_two_writers.py"
            "::test_what_an_attempt_on_another_host_is_writing_is_left_alone_until_it_is_old",
        ),
        (
            "run/test_faults_on_nodes.py::test_of_two_jobs_without_a_lock_the_older_one_ends_and_harms_nothing",
        ),
    ),
    24: Row(
        "fewer nodes come back, more nodes come later",
        "the same global batch and data order; losses within the layout's tolerance",
        (
            "run/test_several_nodes.py::test_a_batch_that_some_numbers_of_nodes_cannot_share_is_refused",
            "data/test_packing.py::test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing",
        ),
        (
            "run/test_several_nodes.py::test_nodes_that_come_and_go_share_the_same_batches",
            "run/test_elastic.py::test_two_of_four_nodes_are_lost_and_two_others_are_taken_in",
            "run/test_elastic.py::test_other_degrees_stay_as_they_are",
        ),
    ),
    25: Row(
        "a node is lost between two checkpoints, with copies of the state in memory",
        "all go on from the other node's copy, bitwise; a flipped one is refused, and the disk is used",
        (
            "../plugins/titan-peers/tests/test_copies.py::test_any_node_may_be_lost_and_all_ranks_load_bit_for_bit",
            "../plugins/titan-peers/tests/test_copies.py::test_a_flipped_byte_is_found_by_all_ranks_wherever_it_is",
            "../plugins/titan-peers/tests/test_copies.py::test_a_copy_that_fails_on_one_rank_leaves_the_one_before",
            "../plugins/titan-peers/tests/test_peers_runs.py::test_a_run_that_failed_continues_from_memory_or_else_from_the_disk",
        ),
        (
            "../plugins/titan-peers/tests/test_peers_runs.py::test_a_node_that_is_lost_costs_no_step_where_another_has_its_copy",
            "../plugins/titan-peers/tests/test_peers_runs.py::test_fewer_nodes_continue_from_the_copies_of_more",
        ),
    ),
}


def test_all_rows_are_there() -> None:
    assert list(MATRIX) == list(range(1, 26))


def is_run(mark: ast.expr) -> bool:
    """Whether a decorator leaves a test, or at least one row of its table, to be run."""
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize":
        rows = mark.args[1]
        return not isinstance(rows, ast.List) or not all("marks=" in ast.unparse(row) for row in rows.elts)
    return not any(word in ast.unparse(mark) for word in ("skip", "xfail", "slow"))


@pytest.mark.parametrize("number", MATRIX)
def test_a_row_is_proved_by_tests_that_exist_and_are_run(
    number: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("fault", asdict(MATRIX[number]))
    row = MATRIX[number]
    assert row.tests and bool(row.on_nodes) == (number >= 16)
    for name in (*row.tests, *row.on_nodes):
        file, _, test = name.partition("::")
        functions = [
            node
            for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == test
        ]
        assert functions, f"{name} does not exist"
        if name in row.tests:
            assert all(is_run(mark) for mark in functions[0].decorator_list), name
        else:
            assert "cluster" in [argument.arg for argument in functions[0].args.args], name


if __name__ == "__main__":
    names = (name for row in MATRIX.values() for name in (*row.tests, *row.on_nodes))
    print(" ".join(dict.fromkeys(f"tests/{name}" for name in names)))

"""Every door from outside: what titan reads that somebody else may have written, and the tests at it.

A new module that opens files or sockets, starts programs or reads the environment, a new variable and a new
file of a run folder belong to a row, see `test_doors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Door:
    """A door, and one test each of what is meant to do harm, and of what is broken."""

    name: str
    modules: str
    """Those of `titancli`, and of plugins, that read what comes through it: patterns, separated by blanks."""
    hostile: str
    damaged: str
    files: str = ""
    """In a run folder: patterns, separated by blanks."""


SEC, RUN = "tests/security/", "tests/run/"
FORMAT, HF = "tests/checkpoint/test_format.py", "tests/checkpoint/test_hf.py"
SMALL = f"{SEC}test_small_files.py::test_a_small_file_that_is_none_is_refused_or_left_out"
LISTED = f"{SEC}test_run_folders.py::test_one_folder_neither_ends_nor_holds_up_the_list_of_all"
LINKS = f"{SEC}test_run_folders.py::test_a_start_writes_through_no_link"
SHOWN = f"{SEC}test_run_folders.py::test_no_command_hands_a_run_folders_text_to_the_terminal"

DOORS = [
    Door(
        "recipes",
        "recipe.read recipe.foreign recipe.load recipe.merge recipe.syntax recipe.toml cli.recipes"
        " cli.new_file titan_proof.prove.proof titan_torchtitan.translate titan_migrate.document"
        " titan_migrate.parts titan_migrate.rows titan_migrate.trainer titan_migrate.llamafactory",
        f"{SEC}test_recipe_fields.py::test_checking_a_recipe_starts_nothing",
        "tests/recipe/test_extends.py::test_broken_files_are_all_told_and_nothing_that_follows_from_them",
    ),
    Door(
        "the lock of a run",
        "worker.rank worker.remote run.compare titan_proof.replay launchers.torchrun loggers.tensorboard"
        " titan_report.page titan_sweep.sweep runs titan_trackio.logger titan_ft.replicas",
        f"{SEC}test_checksums.py::test_a_resume_does_not_go_on_with_another_rate_than_it_had",
        f"{SEC}test_checksums.py::test_each_bit_of_a_lock_file",
        "recipe.lock.toml recipe.lock.*.toml recipe.next.toml",
    ),
    Door(
        "run.json",
        "files runs",
        f"{SEC}test_run_folders.py::test_a_record_of_anything_is_summed_up",
        f"{SEC}test_checksums.py::test_each_bit_of_a_record",
        "run.json",
    ),
    Door(
        "notes",
        "observe.notes",
        SHOWN,
        f"{SEC}test_checksums.py::test_each_bit_of_a_note",
        "note.json",
    ),
    Door("the event log", "observe.events titan_wandb.logger", SHOWN, LISTED, "events.jsonl"),
    Door(
        "logs and reports of ranks",
        "observe.logs observe.failures titan_slurm.command launchers.local launchers.agent"
        " titan_proof.prove.pool titan_sweep.command titan_sweep.jobs distributed.process_group",
        LINKS,
        SMALL,
        "logs/*",
    ),
    Door("locks", "locks", LINKS, LISTED, "run.lock ranks.lock slurm/lock"),
    Door(
        "digests",
        "observe.digests titan_proof.digests",
        LINKS,
        f"{SEC}test_checksums.py::test_each_bit_of_the_digests",
        "digests/*/*.bin",
    ),
    Door(
        "tables of metrics",
        "loggers.csv",
        LINKS,
        "tests/loggers/test_loggers.py::test_a_file_of_somebody_else_is_left_as_it_is",
        "metrics.csv",
    ),
    Door(
        "requests and answers: profiles, replays, evaluations, rollouts, sweeps, jobs",
        "observe.profile_request titan_proof.replay titan_report.view titan_rl.recorded titan_slurm.jobs"
        " run.verification titan_eval.command",
        SMALL,
        SMALL,
        "profile.request profile.json replay.result.json rollouts/* evaluations/* slurm/*",
    ),
    Door(
        "stored distributions of a teacher",
        "titan_distil.store",
        "plugins/titan-distil/tests/test_distil_store.py::test_a_store_of_somebody_else_opens_nothing_outside_and_waits_for_nothing",
        "plugins/titan-distil/tests/test_distil_store.py::test_what_was_made_of_something_else_is_refused_by_name",
        "topk/*",
    ),
    Door(
        "sources that a run keeps, and files of titan reproduce",
        "provenance titan_proof.reproduction",
        "plugins/titan-proof/tests/test_reproduce.py::test_plugin_files_and_the_uncommitted_patch_are_kept_and_never_run",
        "plugins/titan-proof/tests/test_reproduce.py::test_a_file_that_is_damaged_or_newer_or_none_is_refused",
        "sources/*",
    ),
    Door(
        "the git repository around the current folder",
        "provenance",
        f"{SEC}test_git.py::test_nothing_it_names_is_started",
        f"{SEC}test_git.py::test_no_commit_or_no_repository",
    ),
    Door(
        "the rendezvous in a shared folder",
        "launchers.rendezvous launchers.address distributed.shared_folder",
        f"{SEC}test_small_files.py::test_what_no_node_has_written_is_no_place_to_meet",
        "tests/launchers/test_agent.py::test_a_program_at_the_endpoint_that_never_answers_is_not_waited_for",
        "rendezvous/*",
    ),
    Door(
        "sockets and stores that ranks meet through",
        "launchers.agent distributed.process_group distributed.together engine.ranks data.workers"
        " titan_proof.prove.rank titan_proof.prove.pool titan_ft.replicas titan_ft.transport",
        f"{RUN}test_listening.py::test_two_ranks_listen_to_this_machine_alone_also_after_a_restart",
        "tests/launchers/test_agent.py::test_a_program_at_the_endpoint_that_never_answers_is_not_waited_for",
    ),
    Door(
        "checkpoints",
        "checkpoint.format.* checkpoint.exclude checkpoint.save checkpoint.hf.config_match worker.remote",
        f"{RUN}test_hostile.py::test_a_checkpoint_with_a_pickle_in_it_is_passed_over",
        f"{FORMAT}::test_every_bit_of_the_manifest_is_guarded",
        "checkpoints/* checkpoints.*/* exports/*",
    ),
    Door(
        "metadata of checkpoints",
        "checkpoint.format.metadata",
        f"{SEC}test_run_folders.py::test_metadata_of_a_few_bytes_take_little_memory",
        f"{FORMAT}::test_a_layout_that_is_no_json_is_refused",
    ),
    Door(
        "copies in the memory of nodes",
        "titan_peers.*",
        "plugins/titan-peers/tests/test_copies.py::test_a_memory_that_is_small_missing_or_another_users_is_refused_by_name",
        "plugins/titan-peers/tests/test_copies.py::test_a_flipped_byte_is_found_by_all_ranks_wherever_it_is",
    ),
    Door(
        "object stores",
        "checkpoint.remote.*",
        "tests/checkpoint/test_remote.py::test_another_runs_checkpoint_is_left_alone",
        "tests/checkpoint/test_stores.py::test_nothing_is_lost",
    ),
    Door(
        "weights of Hugging Face folders",
        "checkpoint.hf.* checkpoint.format.tensorfile checkpoint.format.tensors titan_hub.files"
        " titan_hub.secrets titan_hub.source",
        f"{RUN}test_hostile.py::test_a_run_refuses_them_and_nothing_is_executed",
        f"{HF}::test_a_truncated_file_is_named",
    ),
    Door(
        "config.json, generation_config.json, adapters",
        "titan_transformers.config_json recipe.config_json cli.finetune recipe.load recipe.peft_folder"
        " run.evaluate generate.source checkpoint.hf.*",
        "plugins/titan-transformers/tests/test_hf_config.py::test_what_is_wrong_is_told_where_the_folder_is_named",
        "plugins/titan-transformers/tests/test_hf_config.py::test_a_config_that_is_no_object",
    ),
    Door(
        "tokenizers and chat templates",
        "data.hf_tokenizer data.trial data.tokenizer_files recipe.vocabulary data.byte_tokenizer"
        " data.template_trial titan_gguf.convert titan_gguf.tokens",
        "tests/docs/test_security.py::test_a_chat_template_is_rendered_in_a_sandbox",
        "tests/data/test_tokenizers.py::test_bad_folders_are_named_with_a_way_out",
    ),
    Door(
        "the Hub",
        "data.hub titan_hub.push",
        "tests/data/test_hf_datasets.py::test_what_cannot_be_loaded_is_named_with_a_way_out",
        "tests/cli/test_download.py",
    ),
    Door(
        "text, rows and prompts",
        "data.files data.formats data.jsonl data.row_formats data.tables data.compressed"
        " data.packing data.parquet_file data.trial_child data.hf_files data.hf_look data.first_look"
        " data.forms generate.prompts titan_rl.rewards titan_grain.dataset",
        "tests/data/test_formats.py::test_what_is_not_read_is_refused_by_name",
        "tests/data/test_jsonl.py::test_where_strict_a_bad_row_is_an_error_with_file_and_line",
    ),
    Door(
        "token shards",
        "data.shards data.shards.*",
        "tests/data/test_remote_shards.py::test_an_index_names_no_file_outside_of_its_folder",
        "tests/data/test_tokenize.py::test_damage_is_named_with_file_and_byte",
    ),
    Door(
        "caches of this user",
        "fingerprint data.lengths data.row_index data.shards.remote data.token_cache registry.badges",
        "tests/data/test_remote_shards.py::test_a_link_in_the_cache_is_not_followed",
        "tests/data/test_fingerprint.py::test_a_cache_that_is_damaged_or_cannot_be_written_changes_nothing",
    ),
    Door(
        "images and what is made of them",
        "titan_flux.*",
        "plugins/titan-flux/tests/test_flux_encode.py::test_what_is_wrong_with_a_folder_is_named",
        "plugins/titan-flux/tests/test_flux_data.py::test_a_bad_shard_is_named_before_the_first_step",
    ),
    Door(
        "task files of lm-eval",
        "titan_eval.*",
        "plugins/titan-eval/tests/test_trust.py::test_a_file_that_would_run_code_is_refused_by_validate_and_by_the_loop",
        "plugins/titan-eval/tests/test_lm_eval.py::test_what_cannot_be_evaluated_is_refused_by_name",
    ),
    Door(
        "installed plugins, whose code is trusted",
        "registry.*",
        "tests/registry/test_isolation.py::test_none_changes_what_a_recipe_does_that_does_not_need_it",
        "tests/registry/test_isolation.py::test_a_faulty_plugin_is_reported",
    ),
    Door(
        "programs that titan starts, and what they answer",
        "doctor launchers.devices titan_slurm.jobs launchers.torchrun provenance"
        " titan_proof.prove.pool titan_sweep.jobs titan_gguf.verify titan_gguf.llamacpp",
        "tests/docs/test_security.py::test_nothing_but_messages_of_ranks_is_unpickled_or_evaluated",
        f"{RUN}test_failures.py::test_an_error_that_echoes_another_ranks_is_never_the_cause",
    ),
    Door(
        "the machine itself: /proc, /sys, files that commands write for who calls them",
        "observe.machine observe.memory observe.panel process signals cli.output cli.new_recipe"
        " titan_report.command titan_gguf.newfile titan_peers.memory engine.build",
        "tests/cli/test_terminal.py",
        "plugins/titan-peers/tests/test_copies.py::test_the_memory_of_a_container_is_what_its_cgroup_leaves",
    ),
]

ENVIRONMENT = {
    "tests/recipe/test_env.py::test_what_is_not_for_a_recipe_is_refused": "CUDA_VISIBLE_DEVICES TITAN_PLUGINS"
    " TITAN_CACHE TITAN_RUNS TMPDIR XDG_CACHE_HOME MASTER_ADDR MASTER_PORT TITAN_EVAL_TRUST_CODE"
    " TITAN_LLAMACPP",
    f"{RUN}test_start_over.py::test_a_launcher_records_no_outcome_of_another_attempt": "TITAN_ATTEMPT",
    f"{RUN}test_orphans.py": "TITAN_PARENT TITAN_ASKED_TO_STOP TORCHELASTIC_USE_AGENT_STORE TITAN_PROVE_RANK",
    f"{RUN}test_listening.py::test_an_interface_that_was_chosen_stays": "GLOO_SOCKET_IFNAME",
    "plugins/titan-ft/tests/test_ft.py::test_a_recipe_names_no_lighthouse": "TORCHFT_LIGHTHOUSE",
    f"{RUN}test_other_launchers.py": "SLURM_STEP_TASKS_PER_NODE",
    "tests/cli/test_terminal.py": "CI FORCE_COLOR NO_COLOR TERM",
    "tests/data/test_remote_shards.py::test_a_limit_that_cannot_be_kept_is_said": "TITAN_SHARDS_GB",
    "tests/recipe/test_env.py::test_a_variable_is_taken_and_kept_in_the_lock": "CUBLAS_WORKSPACE_CONFIG"
    " TOKENIZERS_PARALLELISM RUST_LOG WANDB_MODE",
}
"""By the test of what they may do, the variables that titan reads by name."""

"""Dear tests that run with `--whole` alone, each with the one that runs always and has its parts.

Here one test composes what others have: a whole run of `train` on ranks under several plans, where a checkpoint that
goes from plan to plan does so too; four ranks beside two. `tests/mutations/test_finders.py` holds the list to what is
there: a stand-in runs by default, and nobody who has found a seeded fault is in the list.
"""

_TRAINING, _STATES, _EXPERTS = "tests/training", "tests/states", "tests/sharding/expert"

#: What is left out, by its function or with its parameters, and what stands in for it.
STAND_INS = {
    # Runs under several plans: the numbers of a plan are held to those of one device where the plan is.
    f"{_TRAINING}/test_train.py::test_the_curve_is_the_same_under_every_plan":
        f"{_TRAINING}/test_checkpoint.py::test_a_run_goes_from_plan_to_plan_and_loses_nothing",
    f"{_TRAINING}/test_own.py::test_a_module_of_ones_own_trains_alike_under_other_plans_and_goes_on":
        f"{_TRAINING}/test_checkpoint.py::test_a_run_goes_from_plan_to_plan_and_loses_nothing",
    f"{_TRAINING}/test_dropout.py::test_a_run_that_drops_is_the_same_under_every_plan_and_goes_on_to_the_bit":
        "tests/sharding/test_dropout.py::test_two_ranks_drop_what_one_device_drops",
    f"{_TRAINING}/test_host_memory.py::test_a_run_goes_on_from_a_checkpoint_with_state_on_the_host_and_back":
        f"{_STATES}/tiers/test_weights.py"
        "::test_a_state_goes_from_a_plan_with_weights_on_the_host_to_one_without_and_back",
    f"{_TRAINING}/test_balance.py::test_a_balanced_run_is_the_same_under_every_plan":
        f"{_EXPERTS}/test_loads.py::test_loads_and_corrections_are_those_of_one_device",
    f"{_TRAINING}/test_convert.py::test_a_folder_is_fine_tuned_as_it_is_and_transformers_reads_what_came_of_it":
        f"{_TRAINING}/test_sources.py::test_a_folder_of_hugging_face_is_fine_tuned_as_it_is_from_text_to_text",
    f"{_TRAINING}/test_dcp.py::test_ranks_of_another_program_read_their_shards_of_it":
        f"{_TRAINING}/test_dcp.py::test_torch_reads_our_checkpoint_as_it_is",
    f"{_TRAINING}/test_verify.py::test_a_sound_run_that_is_verified_learns_the_very_same":
        f"{_TRAINING}/test_verify.py::test_a_bit_that_flips_once_is_found_and_the_step_is_taken_anew",
    # States that go from plan to plan.
    "tests/engine/test_optimizer_state.py::test_one_process_goes_on_with_what_ranks_saved":
        "tests/engine/test_optimizer_state.py::test_training_goes_on_under_another_plan",
    "tests/engine/test_optimizer_state.py::test_compact_states_go_on_as_those_of_torch_under_another_plan":
        "tests/engine/test_optimizer_state.py::test_training_goes_on_under_another_plan",
    "tests/engine/test_process_engine.py::test_a_state_that_was_saved_under_one_plan_goes_on_under_another":
        "tests/engine/test_optimizer_state.py::test_training_goes_on_under_another_plan",
    f"{_STATES}/tiers/test_offloaded_buckets.py"
    "::test_a_state_goes_from_a_plan_with_weights_on_the_host_to_another":
        f"{_STATES}/tiers/test_weights.py"
        "::test_a_state_goes_from_a_plan_with_weights_on_the_host_to_one_without_and_back",
    f"{_STATES}/tiers/test_offloaded_buckets.py::test_a_step_that_is_not_finite_leaves_all_as_it_was":
        f"{_STATES}/tiers/test_engines.py::test_a_step_that_is_not_finite_leaves_all_as_it_was",
    # Four ranks, where two do the same.
    f"{_STATES}/tiers/test_engines.py::test_ranks_train_to_the_same_bits":
        f"{_STATES}/tiers/test_offloaded_buckets.py::test_two_ranks_train_to_the_same_bits",
    f"{_STATES}/tiers/test_weights.py::test_ranks_train_to_the_same_bits":
        f"{_STATES}/tiers/test_offloaded_buckets.py::test_two_ranks_train_to_the_same_bits",
    f"{_STATES}/buckets/test_equality.py::test_a_rerun_gives_the_same_bits_on_every_rank":
        "tests/parity/test_matrix.py::test_ranks_train_as_one_device_does",
    f"{_EXPERTS}/test_engines.py::test_four_ranks_do_not_notice_that_experts_moved":
        f"{_EXPERTS}/test_engines.py::test_two_ranks_do_not_notice_that_experts_moved",
    f"{_EXPERTS}/test_parity.py::test_four_ranks_share_out_the_experts":
        f"{_EXPERTS}/test_parity.py::test_two_ranks_share_out_the_experts",
    "tests/sharding/test_dropout.py::test_four_ranks_drop_what_one_device_drops":
        "tests/sharding/test_dropout.py::test_two_ranks_drop_what_one_device_drops",
    "tests/sharding/tensor/test_families.py::test_a_family_is_the_same_model_on_four_ranks":
        "tests/sharding/tensor/test_families.py"
        "::test_a_family_is_the_same_model_on_two_ranks_with_and_without_a_shared_sequence",
    "tests/execution/test_stale.py::test_a_mesh_is_as_stale_as_one_pipeline":
        "tests/execution/test_stale.py::test_weights_are_exactly_one_step_stale",
    "tests/planner/test_measured.py::test_four_ranks_hold_what_fit_says":
        "tests/planner/test_measured.py::test_two_ranks_hold_what_fit_says",
    # The same of a module, of a step or of a path that another test takes.
    "tests/sharding/tensor/test_lengths.py::test_batches_of_changing_lengths_are_evaluated_in_stages":
        "tests/sharding/tensor/test_lengths.py::test_batches_of_changing_lengths_train_as_on_one_device",
    "tests/stages/test_compiled.py::test_two_processes_train_compiled_as_they_do_plain":
        "tests/stages/test_compiled.py::test_a_compiled_pipeline_trains_as_the_plain_one_does",
    "tests/fusion/test_ranks.py::test_a_head_that_is_cut_over_ranks_has_the_loss_of_plain_operators":
        "tests/fusion/test_ranks.py"
        "::test_over_ranks_losses_and_gradients_are_those_of_one_device_and_no_rank_has_whole_logits",
    "tests/parity/test_check_faults.py::test_nothing_is_found_where_nothing_is_wrong":
        "tests/parity/test_command.py::test_a_plan_that_is_right_says_so_and_exits_with_0",
    "tests/promises/test_commands.py"
    "::test_every_example_answers_in_json_and_has_no_colour_in_a_pipe_unless_it_is_forced[train]":
        "tests/training/test_train.py::test_a_run_leaves_all_that_is_needed_to_run_it_again",
    "tests/conformance/test_processes.py::test_no_rank_holds_the_whole_model":
        "tests/engine/test_process_engine.py"
        "::test_initial_weights_depend_on_the_seed_alone_and_no_rank_ever_holds_the_whole",
    "tests/explain/report/test_page.py::test_64_ranks_and_256_microbatches_open":
        "tests/explain/report/test_page.py::test_8_ranks_and_64_microbatches_are_under_3_megabytes",
    "tests/model/test_trace.py::test_networks_of_filters_are_traced_too[resnet-50]":
        "tests/training/test_images.py::test_a_resnet_50_has_its_parameters_and_its_flops",
    "tests/serving/test_overlap.py::test_greedy_tokens_are_those_of_transformers":
        "tests/serving/test_exact.py::test_greedy_tokens_are_those_of_transformers_on_every_path",
}  # fmt: skip

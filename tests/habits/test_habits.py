"""Every program of this folder under every kind of plan: equal to plain torch to 1e-5, or refused with a sentence."""

from pathlib import Path

import pytest

from tests.crowd import Crowd, Crowds
from tests.habits.harness import FOUR, TWO, programs_of, run_one, run_topic, topics, turns_of

TOPICS = topics([each.stem for each in Path(__file__).parent.glob("*.py")])
_PLANS = [(2, plan) for plan in TWO] + [(4, plan) for plan in FOUR]
_EVERY_PLAN = (*TWO, *FOUR)


#: The files of which a program is tried under a plan by default. To ask ranks for nothing takes 25 ms of a core.
_TURNS = [
    (count, plan, topic) for count, plan in _PLANS for topic in TOPICS if plan in turns_of(topic, _EVERY_PLAN).values()
]


@pytest.mark.parametrize(("count", "plan", "topic"), _TURNS, ids=str)
def test_what_users_write_is_equal_to_plain_torch_or_refused(count: int, plan: str, topic: str, crowds: Crowds) -> None:
    """Each program under one plan, in turn: every plan meets some."""
    wrong = crowds.of(count).run(run_topic, topic, plan, _EVERY_PLAN)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


@pytest.mark.whole
@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize(("count", "plan"), _PLANS, ids=str)
def test_all_that_users_write_is_equal_to_plain_torch_or_refused(
    topic: str, count: int, plan: str, crowds: Crowds
) -> None:
    wrong = crowds.of(count).run(run_topic, topic, plan)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


#: Programs that only one trial, or one guard, refuses or puts right; some under plans of their own.
_ONE_TRIAL = [
    ("backwards", "gradients_of_rows_are_centred", "cp=2,microbatches=2"),
    ("calling", "layers_in_pairs", "tp=2,sp=true"),
    ("critics", "a_critic_with_a_spectral_norm", "tp=2"),
    ("critics", "a_critic_with_a_parametrized_spectral_norm", "pp=2,microbatches=2"),
    ("critics", "a_table_of_samples_that_training_writes", "dp=2"),
    ("critics", "a_table_of_samples_in_a_buffer_of_the_criterion", "tp=2"),
    ("critics", "a_step_size_with_a_scaled_gradient", "dp=2"),
    ("critics", "hardest_triplets_of_a_batch", "dp=2"),
    ("critics", "a_forward_compiled_around_layers", "dp=2,zero=1"),
    ("critics", "a_forward_compiled_when_the_engine_is_there", "dp=2,zero=1"),
    ("critics", "layers_compiled_when_the_engine_is_there", "dp=2,zero=3"),
    ("critics", "forwards_counted_in_a_byte", "dp=2"),
    ("critics", "distributions_in_a_forward", "tp=2"),
    ("critics", "gradients_of_each_row_by_torch_func", "pp=2,microbatches=2"),
    ("adapting", "adapters_that_hooks_put_in", "tp=2,sp=true"),
    ("hugging", "a_loss_of_scores_beside_the_models_own", "dp=2"),
    ("handed", "hooks_that_collect_and_write", "pp=2,microbatches=2"),
    ("rows", "experts_that_a_batch_fills", "tp=2,sp=true"),
    ("words", "a_task_whose_targets_are_of_another_type", "dp=2"),
    ("words", "a_task_in_which_rows_meet", "dp=2"),
    ("evaluating", "scores_of_all_pairs", "dp=2"),
    ("evaluating", "its_own_loss_of_held_out_rows", "pp=2,microbatches=2"),
    ("evaluating", "two_heads_and_their_mean", "tp=2"),
    ("selected", "a_mask_and_ignored_labels", "dp=2"),
    ("selected", "a_penalty_inside_of_the_module", "dp=2"),
    ("selected", "a_term_of_marked_tokens", "dp=2"),
    ("selected", "labels_that_are_no_padding", "dp=2"),
    ("selected", "nothing_selected_is_a_loss_of_0", "dp=2"),
    ("selected", "nothing_selected_is_a_small_loss", "pp=2,microbatches=2"),
    ("selected", "rows_of_another_kind_later", "dp=2"),
    ("selected", "weights_that_a_batch_lacks", "dp=2"),
    ("selected", "weights_that_come_later", "dp=2"),
    ("selected", "selected_labels_and_a_penalty", "pp=2,microbatches=2"),
    ("starting", "a_preference_beside_labels", "dp=2"),
    ("starting", "rows_that_meet_in_an_adapter", "dp=2"),
    ("selected", "a_loss_in_chunks_inside_of_the_module", "dp=2"),
    ("selected", "padding_with_a_number_inside_of_the_module", "dp=2"),
    ("selected", "unknown_targets_inside_of_the_module", "dp=2"),
    ("starting", "rows_that_meet_behind_a_gate_in_training", "dp=2"),
    ("starting", "a_number_behind_a_gate", "pp=2"),
    ("starting", "a_distance_that_is_0_at_first", "dp=2"),
    ("starting", "a_penalty_of_each_token_on_the_blocks", "dp=2"),
    ("rewriting", "a_teacher_that_begins_as_its_student", "dp=2,microbatches=2,zero=1"),
    ("rewriting", "such_a_teacher_through_data", "dp=2,recompute=full"),
    ("asking", "a_buffer_set_by_what_a_rank_has_seen", "dp=2"),
    ("asking", "weights_scaled_by_what_a_rank_has_seen", "dp=2"),
    ("asking", "boxes_counted_over_ranks", "dp=2"),
    ("asking", "noise_of_an_optimizer", "dp=2"),
    ("asking", "noise_of_an_optimizer_and_a_seed_of_each_rank", "dp=2"),
    ("looking", "blocks_loaded_by_themselves", "tp=2"),
    ("buffers", "a_last_batch_with_a_row_for_each_part", "dp=2"),
    ("backwards", "gradients_kept_without_a_question", "tp=2"),
    ("buffers", "a_queue_of_rows_and_a_mean_over_replicas", "dp=2"),
    ("tokens", "gradients_of_tokens_are_centred", "cp=2"),
    ("tokens", "long_sequences_do_something_else", "cp=2"),
    ("tokens", "every_other_token_and_a_longer_batch", "cp=2"),
    ("tokens", "tokens_in_reverse_and_a_shorter_batch", "cp=2"),
    ("scripts", "orthogonal_weights_cached_around_a_step", "pp=2,microbatches=2"),
    ("blind", "a_sum_beside_noise", "dp=2"),
    ("blind", "a_mean_and_a_sum_of_what_is_drawn", "dp=2"),
    ("blind", "negatives_of_the_batch_and_drawn_ones", "dp=2"),
    ("blind", "a_batch_norm_of_two_halves", "dp=2"),
    ("blind", "a_batch_norm_with_an_activation", "dp=2"),
    ("blind", "two_views_through_a_batch_norm", "pp=2,microbatches=2"),
    ("blind", "rows_that_meet_in_a_small_term_of_16_bits", "dp=2"),
    ("blind", "a_small_balancing_number_of_16_bits", "dp=2"),
    ("stepping", "steps_counted_for_all_parameters", "dp=2,offload.optimizer=0.5"),
    ("stepping", "steps_counted_in_groups", "dp=2,offload.optimizer=0.5"),
    ("stepping", "steps_counted_in_a_list", "dp=2"),
    ("stepping", "steps_counted_in_a_list", "dp=2,offload.optimizer=1.0"),
    ("stepping", "steps_counted_in_the_script", "dp=2"),
    ("stepping", "rates_drawn_by_python", "dp=2"),
    ("stepping", "a_norm_of_all_now_and_then", "pp=2,microbatches=2"),
    ("stepping", "a_norm_of_all_behind_a_lock", "dp=2,zero=1"),
    ("stepping", "a_step_left_out_for_one_gradient", "pp=2,microbatches=2"),
    ("stepping", "rows_of_a_length_said_to_be_elementwise", "dp=2,zero=1"),
    ("stepping", "norms_of_parameters_said_to_be_elementwise", "tp=2"),
    ("stepping", "an_optimizer_around_another", "dp=2,offload.optimizer=1.0"),
    ("stepping", "two_optimizers_in_one", "dp=2,offload.parameters=1.0"),
    ("stepping", "slow_weights_in_a_dictionary", "dp=2,offload.optimizer=1.0"),
    ("stepping", "attributes_that_a_step_reads", "dp=2,zero=1"),
    ("counting", "a_loss_that_counts_its_calls", "tp=2"),
    ("counting", "hooks_that_keep_a_log", "tp=2"),
    ("weighing", "hidden_channels_read_by_the_loss", "cp=2"),
    ("weighing", "hidden_channels_read_by_the_loss", "tp=2"),
    ("weighing", "the_same_of_a_tied_layer", "pp=2"),
    ("weighing", "a_penalty_on_gradients_of_the_inputs", "pp=2"),
    ("handed", "a_list_that_blocks_append_to", "pp=2,microbatches=2"),
    ("handed", "a_list_that_blocks_append_to", "pp=2,microbatches=2,recompute=full"),
    ("handed", "hooks_that_write_into_what_comes_out", "pp=2,microbatches=2"),
    ("handed", "hooks_that_write_into_what_comes_out", "place,pp=2,microbatches=2,schedule=gpipe"),
    ("handed", "a_list_that_grows_in_training_alone", "pp=2"),
    ("handed", "an_object_of_ones_own_that_blocks_fill", "pp=2,microbatches=2"),
    ("handed", "an_object_of_ones_own_that_blocks_fill", "pp=2,microbatches=2,recompute=full"),
    ("handed", "a_dataclass_that_blocks_add_to", "place,pp=2,microbatches=2,schedule=gpipe"),
    ("handed", "a_set_that_blocks_fill", "pp=2,microbatches=2"),
    ("carried", "a_state_of_the_last_row_alone", "dp=2"),
    ("carried", "a_count_that_its_class_is_given", "tp=2"),
    ("carried", "a_recurrent_state_of_the_root", "pp=2,microbatches=4,schedule=zb-v"),
    ("carried", "a_recurrent_state_of_the_root", "place,pp=2,microbatches=2,schedule=gpipe"),
    ("carried", "a_recurrent_state_of_a_layer", "pp=2,microbatches=2"),
    ("carried", "a_recurrent_state_in_a_buffer", "tp=2,sp=true"),
    ("carried", "recurrent_layers_one_after_the_other", "dp=2,recompute=selective"),
    ("carried", "hooks_on_hidden_states", "pp=2"),
    ("carried", "hooks_on_hidden_states", "place,pp=2,microbatches=2,schedule=gpipe"),
    ("carried", "hooks_on_what_forward_hooks_are_given", "pp=2"),
    ("carried", "hooks_on_what_comes_in", "dp=2,recompute=full"),
    ("carried", "hooks_on_what_comes_in", "pp=2,schedule=zb-h1,microbatches=2,recompute=full"),
    ("carried", "a_scale_of_each_row_in_an_attribute", "place,pp=2,microbatches=4,schedule=zb-h1"),
    ("carried", "an_attribute_that_is_put_back", "pp=2,microbatches=2,recompute=full"),
    ("carried", "a_dataclass_between_blocks", "pp=2,microbatches=2"),
    ("carried", "a_checkpoint_around_the_trunk", "pp=2,microbatches=2"),
    ("carried", "a_checkpoint_around_the_trunk", "place,pp=2,microbatches=2,schedule=gpipe"),
    ("carried", "a_checkpoint_around_the_trunk_in_training_alone", "pp=2"),
    ("carried", "a_batch_cut_to_its_longest_row", "pp=2,microbatches=2"),
    ("mixtures", "one_choice_without_a_dim", "dp=2,ep=2"),
    ("mixtures", "dropped_choices_have_no_expert", "dp=2,ep=2"),
    ("mixtures", "experts_shared_by_layers", "dp=2,ep=2"),
    ("mixtures", "a_router_that_looks_like_experts", "dp=2,ep=2"),
    ("mixtures", "a_noisy_gate_and_an_index", "dp=2,ep=2"),
    ("mixtures", "a_capacity_inside_of_each_part", "dp=2,ep=2"),
    ("mixtures", "a_mean_expert", "dp=2,ep=2"),
    ("mixtures", "an_attribute_left_by_experts", "cp=2,ep=2"),
    ("carried", "experts_balanced_over_all_tokens", "cp=2"),
    ("carried", "experts_balanced_over_padding", "cp=2"),
]


@pytest.mark.parametrize(("topic", "name", "plan"), _ONE_TRIAL, ids=str)
def test_what_one_trial_finds_is_found(topic: str, name: str, plan: str, two: Crowd) -> None:
    assert two.run(run_one, topic, name, plan) == [None, None]


#: On four ranks: everyday scripts under products of axes, and experts beside other axes.
_ON_FOUR = [
    ("fours", "a_cosine_clipping_and_the_best_state", "tp=2,pp=2,microbatches=2"),
    ("fours", "early_exits_share_a_head", "tp=2,pp=2,microbatches=2"),
    ("fours", "images_with_rates_by_depth", "dp=2,tp=2,sp=true"),
    ("fours", "experts_in_a_list_in_every_block", "dp=2,pp=2,microbatches=2,zero=1"),
    ("mixtures", "choices_by_rows_and_tokens", "dp=2,tp=2,ep=2"),
    ("mixtures", "dropped_choices_are_minus_one", "dp=2,pp=2,ep=2,microbatches=2"),
]


@pytest.mark.parametrize(("topic", "name", "plan"), _ON_FOUR, ids=str)
def test_everyday_scripts_on_four_ranks(topic: str, name: str, plan: str, four: Crowd) -> None:
    assert four.run(run_one, topic, name, plan) == [None] * 4


def test_what_replicas_of_a_stage_write_differently_is_found(four: Crowd) -> None:
    found = four.run(run_one, "asking", "a_buffer_assigned_by_what_a_rank_has_seen", "dp=2,pp=2,microbatches=2")
    assert found == [None] * 4


def test_every_plan_has_programs_of_several_files() -> None:
    for plan in _EVERY_PLAN:
        met = [topic for topic in TOPICS if plan in turns_of(topic, _EVERY_PLAN).values()]
        assert len(met) >= (1 if "ep=2" in plan else 2), (plan, met)


def test_no_program_has_the_name_of_another_and_each_says_what_it_is() -> None:
    for topic in TOPICS:
        names = [each.name for each in programs_of(topic)]
        assert len(set(names)) == len(names)
        assert all(each.run.__doc__ for each in programs_of(topic)), topic

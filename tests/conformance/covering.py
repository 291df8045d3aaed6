"""Which models meet which schedules where each rank is a process: few, and of every kind with every kind.

In one process each model meets every fifth schedule, and with `--whole` all of them: what a schedule does to a model is
seen there. Processes add the way between ranks, which depends on the order of a schedule and on the values of a model,
but hardly on both.
"""

from functools import cache

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from tests.conformance.cases import MODELS, PROCESSES, SCHEDULES, Case, layouts_for

#: At least how many schedules a model meets, and how many models a schedule.
NUM_MET = 2

#: Models by what they ask of the way between ranks.
MODEL_KINDS = {
    "a head tied to the embedding": ("gpt2", "llama", "qwen3", "gemma2", "opt", "bloom", "falcon"),
    "decoders without ties": ("mistral", "phi3", "gpt-neox"),
    "experts": ("mixtral", "qwen3-moe", "deepseek-v3"),
    "no row of decoders": ("t5", "bert", "vit", "resnet-50", "u-net"),
}


@cache
def schedule_kind(schedule: str) -> tuple[bool, ...]:
    """Whether weights are held twice, are a step old; whether ranks have several stages; whether backwards are cut."""
    made = make_schedule(schedule, 2, 4)
    return (
        CATALOGUE[schedule].num_weight_copies > 1,
        schedule == "pipedream-2bw",
        len(made.placement.pipes[0]) > 2,
        any(instruction.kind == "I" for order in made.orders for instruction in order),
    )


def is_met_alone(case: Case) -> bool:
    """Whether a cell is run in one process: on a diagonal of five, as neither 2 nor 3 layouts divide 5."""
    return (MODELS.index(case.model) + SCHEDULES.index(case.schedule)) % 5 == 0


@cache
def met_on_ranks() -> dict[tuple[str, str], int]:
    """The pairs of a model and a schedule that are run, and the index of each among the pairs of its schedule.

    A model takes first what its kind has not met in kind, then the schedule that has the most layouts left. Of kinds
    with few models each meets more.
    """
    met: dict[tuple[str, str], int] = {}
    kinds: set[tuple[str, tuple[bool, ...]]] = set()
    num_layouts = {each: max(NUM_MET, len(layouts_for(PROCESSES, each))) for each in SCHEDULES}
    num_kinds = len(set(map(schedule_kind, SCHEDULES)))
    for kind, models in MODEL_KINDS.items():
        for model in models:
            for _ in range(max(NUM_MET, -(-num_kinds // len(models)))):
                counts = {
                    each: sum(other == each for _, other in met) for each in SCHEDULES if (model, each) not in met
                }
                chosen = min(
                    counts, key=lambda each: ((kind, schedule_kind(each)) in kinds, counts[each] - num_layouts[each])
                )
                met[model, chosen] = counts[chosen]
                kinds.add((kind, schedule_kind(chosen)))
    return {pair: met[pair] for pair in sorted(met, key=lambda pair: MODELS.index(pair[0]))}

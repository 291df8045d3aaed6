"""Which models meet which schedules where each rank is a process: few, and every kind of models all that schedules do.

In one process each model meets every fifth schedule, and with `--whole` all of them: what a schedule does to a model is
seen there. Processes add the way between ranks, which depends on the order of a schedule and on the values of a model,
but hardly on both.
"""

from functools import cache

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from tests.conformance.cases import MODELS, PROCESSES, SCHEDULES, Case, case_of, layouts_for

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


def properties(schedule: str) -> set[int]:
    """Which of the four a schedule's kind has; 4 if none."""
    return {index for index, has in enumerate(schedule_kind(schedule)) if has} or {4}


@cache
def met_on_ranks() -> dict[tuple[str, str], int]:
    """The pairs of a model and a schedule that are run, and the layout of each, by its turn.

    A model takes first what its kind has not met in its properties, then the schedule that the fewest have met. Of
    kinds with few models each meets two. Its layout is one that nobody has met, else that of the fewest ranks: a rank
    more is a process more, and all layouts are met in one process.
    """
    met: dict[tuple[str, str], int] = {}
    laid_out: set[tuple[int, int]] = set()
    seen: set[tuple[str, int]] = set()
    counts = dict.fromkeys(SCHEDULES, 0)
    for kind, models in sorted(MODEL_KINDS.items(), key=lambda item: len(item[1])):
        for model in (each for each in models for _ in range(2 if len(models) < len(MODEL_KINDS) else 1)):
            open_to = [each for each in SCHEDULES if (model, each) not in met]
            new = {each: {(kind, one) for one in properties(each)} - seen for each in open_to}
            chosen = min(open_to, key=lambda each: (-len(new[each]), counts[each]))
            cases = [case_of(model, chosen, turn) for turn in range(len(layouts_for(PROCESSES, chosen)))]
            sizes = [(case.num_ranks, case.num_stages) for case in cases]
            turn = min(range(len(cases)), key=lambda each: (sizes[each] in laid_out, sizes[each]))
            laid_out.add(sizes[turn])
            met[model, chosen] = turn
            seen |= new[chosen]
            counts[chosen] += 1
    return {pair: met[pair] for pair in sorted(met, key=lambda pair: MODELS.index(pair[0]))}

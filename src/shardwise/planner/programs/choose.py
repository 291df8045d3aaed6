"""Recognise a program, and find the best plan that it can run."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import ShardwiseError, unknown
from shardwise.planner.account import Account, account
from shardwise.planner.plan import Plan
from shardwise.planner.programs.accelerate import ACCELERATE
from shardwise.planner.programs.deepspeed import DEEPSPEED
from shardwise.planner.programs.megatron import MEGATRON, TELLING
from shardwise.planner.programs.program import Job, Machine, Program
from shardwise.planner.programs.torchtitan import TORCHTITAN
from shardwise.planner.question import Question, usual_software
from shardwise.planner.search.findings import Findings, best_first, find_plan, find_plan_if_any
from shardwise.planner.search.tally import Tally

PROGRAMS = {each.name: each for each in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}
#: Programs that serve and do not train: see `vllm.py`.
SERVERS = ("vllm",)
_NOT_ON_HOST = {"offload.optimizer": 0.0, "offload.parameters": 0.0, "offload.activations": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as a program's text. `problems` are the properties of the best plan that it cannot express."""

    program: Program
    text: str
    account: Account
    problems: tuple[str, ...]


def get_program(name: str) -> Program:
    """Return the program with this name."""
    if name not in PROGRAMS:
        error = unknown("program", name, (*PROGRAMS, *SERVERS))
        raise ShardwiseError(error.problem, remedy=f"--for {error.remedy or 'megatron'}")
    return PROGRAMS[name]


def recognise(text: str) -> Program:
    """Return the program that a file or arguments are for."""
    if re.search(r'"(zero_optimization|train_batch_size|train_micro_batch_size_per_gpu)"', text):
        return DEEPSPEED
    if re.search(r"^\s*\[(parallelism|training)\]", text, re.MULTILINE):
        return TORCHTITAN
    if re.search(r"^distributed_type:", text, re.MULTILINE):
        return ACCELERATE
    if re.search(rf"pretrain_\w+\.py|--({'|'.join(TELLING)})(?![\w-])", text):
        return MEGATRON
    raise ShardwiseError(
        f"no program is recognised in {text.strip()[:60]!r}: it has no argument of Megatron-LM or vLLM, no "
        "[parallelism] of torchtitan, no zero_optimization of DeepSpeed and no distributed_type of Accelerate",
        remedy="--from ds_config.json, or --from 'pretrain_gpt.py --tensor-model-parallel-size 8'",
    )


def read_source(given: str) -> str:
    """Return the text that `--from` gives: the content of a file, or the words typed."""
    looks_like_file = re.search(r"\.(toml|json|ya?ml|sh|txt)$", given) is not None and " " not in given
    if not looks_like_file:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ShardwiseError(
            f"{given} cannot be read: {why}", remedy="the path of a file, or the arguments in quotes"
        ) from None


def machine_of(question: Question) -> Machine:
    return Machine(num_devices=question.cluster.num_devices, num_layers=question.model.num_layers)


def as_run_by(program: Program, question: Question) -> Question:
    """Return the question with the program's own kernels and overlap. Attention depends on the device."""
    attention = usual_software(question.device).attention
    return replace(question, software=replace(program.software, attention=attention))


def find_for(program: Program, question: Question) -> Findings:
    """Return the best plan as the program would run it: without offload, if that fits."""
    asked = as_run_by(program, question)
    found = find_plan_if_any(replace(asked, fixed={**_NOT_ON_HOST, **asked.fixed}), Tally())
    return find_plan(asked) if found is None else replace(found, question=asked)


def export(program: Program, question: Question, found: Findings) -> Export:
    """Return the text for the best plan, or for the best that the program can express."""
    problems = tuple(program.problems(found.plan))
    best = account(question, found.plan) if not problems else best_for(program, question, [found])
    told = program.with_layers(best.plan, best.layers)
    job = Job(plan=told, batch=question.batch, sequence=question.sequence)
    return Export(program=program, text=program.write(job), account=replace(best, plan=told), problems=problems)


def best_for(program: Program, question: Question, found: Iterable[Findings] = ()) -> Account:
    """Return the best plan that a program can express and that fits; if none does, the nearest to it."""
    plans: list[Plan] = [each.plan for one in found for each in (one.best, *one.others)]
    for home in (_NOT_ON_HOST, {}):
        for fixed in program.fixed:
            searched = find_plan_if_any(replace(question, fixed={**home, **fixed, **question.fixed}), Tally())
            plans += [] if searched is None else [searched.plan]
        accounts = _accounts(program, question, plans)
        if any(each.fits for each in accounts):
            break
    if not accounts:
        raise ShardwiseError(
            f"{program.title} can express no plan for {question.model.name} on {question.cluster}",
            remedy="shardwise plan without --for",
        )
    fitting = best_first(accounts)
    return fitting[0] if fitting else min(accounts, key=lambda each: each.fullest.total)


def _accounts(program: Program, question: Question, plans: Iterable[Plan]) -> list[Account]:
    accounts: list[Account] = []
    for plan in dict.fromkeys(str(program.nearest(replace(each, reasons={}))) for each in plans):
        try:
            accounts.append(account(question, Plan.parse(plan)))
        except ShardwiseError:
            continue  # Its substitute may not divide this batch or these layers.
    return accounts

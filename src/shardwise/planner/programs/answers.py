"""`plan --for` and `fit --from`: the answers of these commands."""

import argparse
from collections.abc import Callable
from pathlib import Path

from shardwise.answer import Answer, Canvas
from shardwise.cost.serving import BLOCK
from shardwise.errors import ShardwiseError
from shardwise.output import save_output
from shardwise.planner.account import Account, account
from shardwise.planner.changes import Change, cheapest_changes
from shardwise.planner.drawing import account_data
from shardwise.planner.programs import vllm
from shardwise.planner.programs.choose import (
    as_run_by,
    best_for,
    export,
    find_for,
    get_program,
    machine_of,
    read_source,
    recognise,
)
from shardwise.planner.programs.program import Machine
from shardwise.planner.question import Question, make_question
from shardwise.planner.serving import Target, find_serving
from shardwise.units import format_bytes, format_percent, format_seconds
from shardwise.working import working_at

# A better plan is mentioned if it gains at least this much: predictions are no better than that.
_WORTH = 0.03
_OUTPUT = 256


def plan_answer(arguments: argparse.Namespace, question: Question) -> Answer:
    """Return the best plan that a program can run, as the program's text."""
    if arguments.goal not in (None, "fastest"):
        raise ShardwiseError(
            f"--for is for the fastest step, and not for --goal {arguments.goal}", remedy="--for alone"
        )
    program = get_program(arguments.program)
    found = find_for(program, question)
    made = export(program, found.question, found)
    if arguments.save is not None:
        save_output(Path(arguments.save), made.text, remedy=f"--save {program.file.split()[-1]}")
    data = {
        "model": question.model.name,
        "cluster": str(question.cluster),
        "batch": question.batch,
        "sequence": question.sequence,
        **account_data(made.account),
        "program": program.name,
        "text": made.text,
        "cannot_express": list(made.problems),
        "best_of_all": account_data(found.best) if made.problems else None,
        "saved": arguments.save,
    }

    def render(canvas: Canvas) -> None:
        best = made.account
        canvas.print(f"{canvas.paint(question.model.name, 'bold')} on {question.cluster}, for {program.title}")
        for problem in made.problems:
            canvas.print(f"  {problem}.")
        if made.problems:
            slower = best.seconds / found.best.seconds - 1.0
            whole = format_seconds(found.best.seconds)
            canvas.print(f"  The best plan of all, {found.best.text}, would take {whole} if it ran there;")
            much = f"{format_percent(abs(slower))} {'longer' if slower > 0 else 'less, and is less simple'}"
            much = much if round(1000 * abs(slower)) else "as long"
            canvas.print(f"  the best that {program.title} can run takes {much}.")
        canvas.print()
        canvas.print(f"  plan  {canvas.paint(best.text, 'bold green')}")
        canvas.print(
            f"  step  {format_seconds(best.seconds)} ({format_seconds(best.low)} to {format_seconds(best.high)}), "
            f"{format_bytes(best.fullest.total)} of {format_bytes(best.fullest.capacity)} on the fullest rank"
            f"{'' if best.fits else ': it does not fit'}"
        )
        canvas.print(f"\n{canvas.paint(program.file, 'dim')}\n{made.text}")
        if arguments.save is not None:
            canvas.print(f"saved in {arguments.save}")

    return Answer(data=data, render=render, status=0 if made.account.fits else 1)


def fit_answer(
    arguments: argparse.Namespace, *, usual_sequence: int, draw: Callable[[Account, tuple[Change, ...], Canvas], None]
) -> Answer:
    """Return whether a program's configuration fits, how long its step is, and a better one."""
    text = read_source(arguments.source)
    if vllm.is_vllm(text):
        return _served(arguments, vllm.read(text))
    program = recognise(text)
    asked = make_question(
        arguments.model,
        cluster=arguments.cluster,
        batch=arguments.batch or 1,
        sequence=arguments.sequence,
        usual_sequence=usual_sequence,
        lora=arguments.lora,
    )
    machine: Machine = machine_of(asked)
    job = program.read(text, machine)
    batch = arguments.batch or job.batch or job.plan.dp * job.plan.microbatches
    question = as_run_by(
        program,
        make_question(
            arguments.model,
            cluster=arguments.cluster,
            batch=batch,
            sequence=arguments.sequence or job.sequence,
            usual_sequence=usual_sequence,
            lora=arguments.lora,
        ),
    )
    working_at("the account of every rank")
    found = account(question, job.plan)
    changes = () if found.fits else cheapest_changes(found)
    working_at("what would be better")
    better = _better(found, best_for(program, question))
    data = {
        "model": question.model.name,
        "cluster": str(question.cluster),
        "batch": question.batch,
        "sequence": question.sequence,
        "program": program.name,
        **account_data(found),
        "changes": [{"change": each.words, "slower": each.slower, **account_data(each.account)} for each in changes],
        "better": None if better is None else account_data(better),
    }

    def render(canvas: Canvas) -> None:
        canvas.print(f"{program.title} is told: {found.text}\n")
        draw(found, changes, canvas)
        canvas.print()
        if better is None:
            canvas.print(f"No plan that {program.title} can run is predicted to be faster by more than 3 %.")
        else:
            gain = 1.0 - better.seconds / found.seconds
            faster = f", {100 * gain:.0f} % less" if found.fits else ""
            canvas.print(f"Better: {better.text}, {format_seconds(better.seconds)} a step{faster}.")

    return Answer(data=data, render=render, status=0 if found.fits else 1)


def _better(found: Account, best: Account) -> Account | None:
    if not best.fits or (found.fits and best.seconds > (1.0 - _WORTH) * found.seconds):
        return None
    return best


def _served(arguments: argparse.Namespace, server: vllm.Server) -> Answer:
    """Do the same for a server: how many sequences fit, latencies, and tokens per second."""
    longest = server.longest
    prompt = arguments.sequence or (max(longest - _OUTPUT, 1) if longest else None)
    question = make_question(arguments.model, cluster=arguments.cluster, batch=1, sequence=prompt, usual_sequence=1024)
    target = Target(output=_OUTPUT, experts_over_all=True)
    way, fits = vllm.account_for(server, question, target)
    best = find_serving(question, target).best
    gain = best.tokens_per_second / way.tokens_per_second - 1.0
    data = {
        "model": question.model.name,
        "cluster": str(question.cluster),
        "program": "vllm",
        "fits": fits,
        "plan": str(way.plan),
        "prompt": question.sequence,
        "output": target.output,
        "asked_sequences": server.sequences,
        "sequences": way.sequences,
        "first_token_seconds": way.first_token,
        "each_token_seconds": way.each_token,
        "tokens_per_second": way.tokens_per_second,
        "kv_blocks": way.num_blocks,
        "not_priced": list(server.unpriced),
        "better": {"plan": str(best.plan), "sequences": best.sequences, "tokens_per_second": best.tokens_per_second}
        if gain > _WORTH
        else None,
    }

    def render(canvas: Canvas) -> None:
        canvas.print(f"vLLM is told: {way.plan}, {server.sequences} sequences at once in each replica")
        for words in server.unpriced:
            canvas.print(f"{words}.")
        if not fits:
            canvas.print(
                f"It does not fit: {format_bytes(way.weight_bytes)} of weights on a device, and no room for one "
                f"sequence of {question.sequence + target.output} tokens."
            )
        else:
            canvas.print(
                f"It fits, with {way.num_blocks:,} KV blocks of {BLOCK} tokens: {way.sequences} such sequences at once,"
                f" {way.tokens_per_second:,.0f} tokens/s in all, the first token after "
                f"{format_seconds(way.first_token)}, then one every {format_seconds(way.each_token)}."
            )
        if gain > _WORTH:
            canvas.print(
                f"Better for tokens a second: {best.plan} with {best.sequences} sequences at once, "
                f"{best.tokens_per_second:,.0f} tokens/s."
            )

    return Answer(data=data, render=render, status=0 if fits else 1)

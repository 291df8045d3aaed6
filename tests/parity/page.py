"""docs/composition.md: the plans that are proven, with their worst errors, and those that are refused."""

from pathlib import Path

from shardwise.parity.compare import Comparison, Kind
from shardwise.parity.faults import FAULTS
from shardwise.planner.composition import RULES
from tests.parity.cases import CASES
from tests.parity.models import NUM_STEPS
from tests.planner.refused import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
KINDS: tuple[Kind, ...] = ("loss", "gradient", "norm", "weight")

_HEAD = f"""\
# Combinations of axes: tested and refused

This page lists the plans that are compared with one device, the errors that were measured, and the combinations that
are refused.

Every plan below is trained in fp32 for {NUM_STEPS} steps with AdamW, one process per rank, over gloo, and compared
with plain torch on one device, which trains on whole batches. The comparison covers each loss and gradient norm, every
gradient of the last step before clipping, the weights after that step, and an evaluation, by the names of the original
module. A second run gives the same numbers bit for bit. `shardwise check --plan P` compares more, for any plan and for
your own module: [check.md](check.md) says what it covers, and which faults it has found.

Errors are relative, |ours - theirs| / |theirs|; each is the worst over all tensors and ranks. The limit is 1e-5. The
models are small (`tests/parity/models.py`). Ours have tied embeddings and a vocabulary of 257 unless their name says
otherwise; llama, hf-gpt2, mixtral and qwen3-moe come from `transformers`.

This page is generated. `pytest tests/parity/test_matrix.py --write-composition` measures every plan and writes it;
`pytest tests/parity/test_page.py --write-composition` writes it with the errors of the last measurement.
"""
_REFUSED = """\
## What is refused

Some plans are refused before anything starts. The planner applies the same rules (`planner/composition.py`), and each
refusal names the nearest plan that runs. This table has one example of each rule:
"""


_CHECK = """\
## Checking a plan

    shardwise check --plan dp=2 --module my_package.nets:factory  yours: factory() returns a module, a batch and a loss
    shardwise check --plan dp=2,tp=2,pp=2 --device cuda           on GPUs, which ranks share if there are too few

`shardwise check` starts the ranks on this machine, trains the same steps on one device, and compares the quantities
above at every step, and also the weights as each forward uses them. It prints the tensors with the largest errors, the
first tensor that differs in the order of the computation, and the ranks that hold it, with their stage and shard. The
exit status is 1 if something differs. `--json` has `ok`, `max_relative_error` (`loss`, `gradient`, `norm`, `weight`,
`evaluation`), `first_difference`, `covered` and `left_out`. More examples are in [check.md](check.md).

`--inject FAULT` breaks the run on purpose, to show that the check would notice:
"""


class Proofs:
    """What was proven of each case; of those that are not run, what a page says."""

    def __init__(self, page: str = "") -> None:
        self._found: dict[tuple[str, str], Comparison] = {}
        rows = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `"))
        self._kept = {(row[1], row[0].strip("`")): row[2:] for row in rows if len(row) == 2 + len(KINDS)}

    def note(self, model: str, plan: str, comparison: Comparison) -> None:
        self._found[model, plan] = comparison

    @property
    def are_all(self) -> bool:
        return {case for cases in CASES.values() for case in cases} <= self._found.keys() | self._kept.keys()

    def page(self) -> str:
        parts = [_HEAD]
        for count, cases in CASES.items():
            rows = [[f"`{plan}`", model, *self._errors(model, plan)] for model, plan in cases]
            parts.append(f"## {count} ranks: {len(cases)} plans\n\n{_table(['plan', 'model', *KINDS], rows)}")
        faults = [[f"`{name}`", fault.says] for name, fault in FAULTS.items()]
        parts.append(f"{_CHECK}\n{_table(['fault', 'what goes wrong'], faults)}")
        refused = [
            [f"`{plan}`", problem, f"`{instead}`"] for plan, problem, instead in (REFUSED[rule.name] for rule in RULES)
        ]
        parts.append(f"{_REFUSED}\n{_table(['plan', 'why not', 'nearest'], refused)}")
        return "\n".join(parts)

    def _errors(self, model: str, plan: str) -> list[str]:
        comparison = self._found.get((model, plan))
        return self._kept[model, plan] if comparison is None else [digits(comparison.worst(kind)) for kind in KINDS]


def digits(error: float) -> str:
    """One digit is enough to see how far it is from the promise."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def _table(titles: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [titles, ["---"] * len(titles), *rows])


def without_figures(page: str) -> str:
    """A page but for its errors: what does not change from run to run."""
    rows = (line.split(" | ") for line in page.splitlines())
    return "\n".join(" | ".join(row[:2] if len(row) == 2 + len(KINDS) else row) for row in rows)

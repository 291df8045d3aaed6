"""Random numbers in a stage: they depend on the seed of the pass, the stage and the microbatch, and on nothing else.

On the CPU all threads draw from one generator, in whatever order they come. So a stage has a state of its own, and
whenever it draws, the generator has that state for as long as the draw takes. A GPU has a generator of its own, and one
thread: there the stage's seed is set before it is run.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.stages.split.flow import draws
from shardwise.torch_private import TorchDispatchMode, saved_tensor_hooks

_ONE_AT_A_TIME = threading.Lock()


class RngState:
    """The random numbers of one pass. `have_drawn` says afterwards whether there were any."""

    def __init__(self, *, trains: bool) -> None:
        self._before = torch.get_rng_state()
        self._seed = int(torch.randint(2**62, ()))
        self._trains = trains
        self.have_drawn = False

    def forget(self) -> None:
        """Restore the caller's generator: nothing was drawn."""
        torch.set_rng_state(self._before)

    @contextmanager
    def of(self, stage: int, microbatch: int, device: torch.device) -> Iterator[None]:
        """Return the context in which a stage is run on a microbatch."""
        text = f"{self._seed}/{stage}/{microbatch}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        if device.type == "cuda":
            self.have_drawn = True
            with torch.random.fork_rng([device]):
                torch.cuda.manual_seed(seed)
                yield
        else:
            with _Drawing(self, seed):
                yield

    def check_draw(self, around: object) -> None:
        """Note a draw, and refuse one that would be made again in the backward, where the others draw too.

        There somebody else than `around` the stage takes what autograd saves.
        """
        self.have_drawn = True
        is_recomputed = saved_tensor_hooks() != around
        if self._trains and (is_recomputed or not torch.is_grad_enabled()):
            raise ShardwiseError(
                "a part that is recomputed in the backward (checkpointed) draws random numbers, and with several"
                " microbatches on places of the CPU it would draw others the second time",
                remedy="microbatches=1, a dropout of 0, or no gradient checkpointing",
            )


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a stage, and lets those that draw do so from the stage's own state."""

    def __init__(self, rng: RngState, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng, self._around = rng, saved_tensor_hooks()
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if not draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self._rng.check_draw(self._around)
        with _ONE_AT_A_TIME:
            before = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._state = torch.get_rng_state()
                torch.set_rng_state(before)

"""One thread for each place for the duration of a pass: all have ended when the pass returns."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class StoppedError(Exception):
    """Another place has failed, so this one must stop waiting."""


class Mail:
    """A mailbox between places: each value has an address and is collected once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[Hashable, Any] = {}
        self._is_stopped = False

    def post(self, address: Hashable, what: Any) -> None:
        with self._changed:
            self._arrived[address] = what
            self._changed.notify_all()

    def collect(self, address: Hashable) -> Any:
        """Wait for the value of an address, remove it and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or address in self._arrived)
            if address not in self._arrived:
                raise StoppedError
            return self._arrived.pop(address)

    def stop(self) -> None:
        """Wake all waiting threads: they raise `StoppedError`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadContext:
    """Torch's thread-local settings (gradient mode, autocast and so on), to be copied from the calling thread."""

    computes_gradients: bool
    is_inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    num_threads: int

    @staticmethod
    def here(num_threads: int) -> "ThreadContext":
        """Return the settings of the calling thread, with `num_threads` intra-op threads."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return ThreadContext(
            computes_gradients=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            autocasts=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            num_threads=num_threads,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.computes_gradients))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def run_together(jobs: Sequence[tuple[str, Callable[[], None]]], mail: Mail, around: ThreadContext) -> None:
    """Run each place's job in a thread of its own, and raise the first error of any, with the place's name."""
    errors: list[BaseException] = []
    before = torch.get_num_threads()

    def run(name: str, job: Callable[[], None]) -> None:
        try:
            with around.entered():
                job()
        except StoppedError:
            pass
        except BaseException as error:
            error.add_note(f"on {name}")
            errors.append(error)
            mail.stop()

    threads = [threading.Thread(target=run, args=job, name=f"shardwise {job[0]}", daemon=True) for job in jobs]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        mail.stop()  # If the caller is interrupted, threads end after their current operation.
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        # Restore it: new threads of others inherit the number that was set last, in any thread.
        torch.set_num_threads(before)
    if errors:
        raise errors[0]

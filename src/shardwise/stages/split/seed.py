"""Seeding torch's generators many times over, for runs that are tried."""

import torch


def seed_torch(number: int) -> None:
    """Seed torch's generators of all devices in use.

    `torch.manual_seed` also leaves a call for each kind of device that is not in use, with the text of the whole stack:
    some milliseconds each time, of which a trial needs hundreds. And a GPU that came into use later would start from a
    number of ours.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)

"""Waits that would never end are ended from outside, whatever a script has done with its groups meanwhile."""

import torch.distributed as dist

from shardwise.ranks.breaking import break_all
from shardwise.ranks.spawn import Ranks


def _broken_when_destroyed() -> int:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    dist.destroy_process_group(group)
    break_all([group])
    return group.size()


def test_a_group_that_the_script_has_destroyed_has_no_waits_left(two: Ranks) -> None:
    """`finally: dist.destroy_process_group()` after a refusal; the watch's thread once ended in a traceback."""
    assert two.run(_broken_when_destroyed) == [2, 2]

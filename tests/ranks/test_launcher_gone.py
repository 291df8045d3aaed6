"""A rank whose agent is killed ends by itself: nobody would start it again, and it would hold the folder of its run."""

import os
import signal
import warnings

from shardwise.ranks.worker import _look_for
from tests.ranks.processes import are_gone


def test_a_rank_ends_when_its_agent_is_killed() -> None:
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        agent = os.fork()
    if not agent:
        agent = os.getpid()  # Asked for here: when the rank asks for its parent, that may have been killed already.
        rank = os.fork()
        if not rank:
            _look_for(agent)
        os.write(writes, str(rank).encode())
        signal.pause()
    rank = int(os.read(reads, 20))
    os.close(reads)
    os.close(writes)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert are_gone([rank])

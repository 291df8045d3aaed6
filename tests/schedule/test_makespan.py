"""The longest way through a schedule is as long as the schedule played event by event."""

import numpy as np
import pytest

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.makespan import makespan
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import simulate


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "pipedream-2bw"])
def test_the_longest_way_is_what_simulation_takes(name: str) -> None:
    chance = np.random.default_rng(len(name))
    entry = CATALOGUE[name]
    for num_ranks, num_microbatches in ((2, 4), (4, 8), (4, 24)):
        for chunks in (None,) if entry.any_chunks_from is None else (2, 4):
            schedule = make_schedule(name, num_ranks, num_microbatches, chunks)
            placement = schedule.placement
            times = [
                StageTimes(forward=each[0], input_gradient=each[1], weight_gradient=each[2])
                for each in chance.uniform(0.5, 2.0, (placement.num_stages, 3))
            ]
            hop = float(chance.choice([0.0, 0.3, 3.0]))
            prices = stage_prices(placement, times, hops=[hop])
            one_each = len(times) == placement.num_stages != placement.num_ranks
            share = 1.0 if one_each else placement.share
            seconds = {
                (kind, stage): share * taken for stage, each in enumerate(times) for kind, taken in each.by_kind.items()
            }
            assert makespan(schedule, seconds, hop) == pytest.approx(simulate(schedule, prices).makespan, rel=1e-9)

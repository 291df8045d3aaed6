"""Tests of one group run in one worker: what they share is made once, and ranks are on one worker alone."""

import pytest


def test_the_scheduler_is_told_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("only with --dist loadgroup are there groups")
    assert request.node.nodeid.endswith("@tests-test_groups")

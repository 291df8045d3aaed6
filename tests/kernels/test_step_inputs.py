"""The inputs of a step, from one run of whole numbers."""

from dataclasses import fields

import torch

from shardwise.kernels.step_inputs import StepInputs, make_step_inputs, unpack_inputs


def test_rows_tokens_of_the_step_before_and_room_for_more() -> None:
    floats = torch.tensor([[0.6, 0.9, 0.1], [0.0, 1.0, 0.0], [1.5, 0.2, 0.0]]).view(torch.int32).tolist()
    rows = [
        [7, 0, 11, -12, floats[0][0], 5, floats[0][1], floats[0][2], 3, 0, 0],
        [-3, 9, 1, 2, floats[1][0], 0, floats[1][1], floats[1][2], 8, 1, 6],
        [-1, 4, -5, 6, floats[2][0], 1, floats[2][1], floats[2][2], 2, 5, 0],
    ]
    packed = torch.tensor([3, 3, *(each for row in rows for each in row), 99, 99], dtype=torch.int32)
    before = torch.tensor([40, 50, 60, 70])

    def made(kernels: bool) -> StepInputs:
        out = make_step_inputs(5, 6, packed.device)
        unpack_inputs(packed, before, out, 4, kernels=kernels)
        return out

    mine, plain = made(True), made(False)
    for each in fields(StepInputs):
        assert torch.equal(getattr(mine, each.name), getattr(plain, each.name)), each.name
    assert plain.tokens.tolist() == [7, 60, 40, 0, 0]
    assert plain.slots.tolist() == [12, 25, 20, -1, -1]
    assert plain.lengths.tolist() == [1, 10, 5, 0, 0]
    assert plain.tables[1].tolist() == [8, 1, 6, 0, 0, 0]
    assert plain.top_p.tolist()[1:] == [1.0, torch.tensor(0.2).item(), 1.0, 1.0]

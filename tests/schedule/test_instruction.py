import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Kind,
    backward,
    forward,
    overlapped,
    parse,
)

numbers = st.integers(min_value=0, max_value=10**6)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    """Any instruction that can stand in a schedule, pairs among them."""
    kind = draw(st.sampled_from(Kind))
    stage, microbatch = draw(numbers), draw(numbers)
    if kind in SENDS | RECEIVES:
        return Instruction(kind, stage, microbatch, draw(numbers))
    if kind is Kind.REDUCE:
        return Instruction(kind, stage, microbatch, draw(st.none() | numbers))
    if kind is Kind.F and draw(st.booleans()):
        back = Instruction(draw(st.sampled_from(sorted(BACKWARD))), draw(numbers), draw(numbers))
        return overlapped(forward(stage, microbatch), back)
    return Instruction(kind, stage, microbatch)


@given(instructions())
def test_the_text_of_every_instruction_parses_back(instruction: Instruction) -> None:
    assert parse(str(instruction)) == instruction
    assert parse(str(instruction)) == instruction


@given(instructions(), instructions())
def test_different_instructions_have_different_texts(one: Instruction, other: Instruction) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("2F0", Instruction(Kind.F, 2, 0)),
        ("2B0", Instruction(Kind.B, 2, 0)),
        ("2I0", Instruction(Kind.I, 2, 0)),
        ("2W0", Instruction(Kind.W, 2, 0)),
        ("4F3&3B1", Instruction(Kind.F, 4, 3, beside=Instruction(Kind.B, 3, 1))),
        ("4F3&3I1", Instruction(Kind.F, 4, 3, beside=Instruction(Kind.I, 3, 1))),
        ("0SEND_F2>1", Instruction(Kind.SEND_F, 0, 2, 1)),
        ("1RECV_F2<0", Instruction(Kind.RECV_F, 1, 2, 0)),
        ("1SEND_B2>0", Instruction(Kind.SEND_B, 1, 2, 0)),
        ("0RECV_B2<1", Instruction(Kind.RECV_B, 0, 2, 1)),
        ("2GATHER0", Instruction(Kind.GATHER, 2, 0)),
        ("2RELEASE0", Instruction(Kind.RELEASE, 2, 0)),
        ("2REDUCE0", Instruction(Kind.REDUCE, 2, 0)),
        ("2REDUCE0~1", Instruction(Kind.REDUCE, 2, 0, 1)),
        ("2STEP0", Instruction(Kind.STEP, 2, 0)),
        ("2OFFLOAD3", Instruction(Kind.OFFLOAD, 2, 3)),
        ("2RELOAD3", Instruction(Kind.RELOAD, 2, 3)),
    ],
)
def test_every_example_of_the_text_form_means_what_it_says(text: str, instruction: Instruction) -> None:
    assert parse(text) == instruction
    assert str(instruction) == text


def test_the_short_ways_to_write_a_computation_give_its_kind() -> None:
    assert [str(forward(2, 0)), str(backward(2, 0))] == ["2F0", "2B0"]


def test_an_instruction_alone_is_its_own_only_part() -> None:
    assert forward(1, 2).parts == (forward(1, 2),)


def test_a_pair_has_its_halves_as_parts() -> None:
    assert overlapped(forward(4, 3), backward(3, 1)).parts == (forward(4, 3), backward(3, 1))


def test_a_pair_of_anything_else_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="2B0 is not a forward"):
        overlapped(backward(2, 0), backward(3, 0))
    with pytest.raises(AssertionError, match="3W0 is not a backward"):
        overlapped(forward(2, 0), parse("3W0"))


def test_every_kind_computes_or_moves_bytes_or_lets_go() -> None:
    moves = SENDS | RECEIVES | {Kind.GATHER, Kind.REDUCE, Kind.OFFLOAD, Kind.RELOAD}
    assert set(Kind) == COMPUTE | moves | {Kind.RELEASE}
    assert not COMPUTE & moves


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        *(
            (
                text,
                f"'{text}' is not an instruction: it must be a stage, a kind and a microbatch",
                "2F0, 1I3, 0SEND_F2>1, 1RECV_F2<0, 4F3&3B1 or 2STEP0",
            )
            for text in ("", "F0", "2F", "F", "2f0", "-1F0", "2F0 ", "2F0>", "2 F 0", "2F0.5", "2F0>-1")
        ),
        (
            "2FF0",
            "unknown instruction 'FF'; known: F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, GATHER, RELEASE, REDUCE, "
            "STEP, OFFLOAD, RELOAD",
            "F",
        ),
        ("0SEND_F2", "'0SEND_F2': SEND_F names its peer stage after '>'", "0SEND_F2>1"),
        ("0SEND_F2<1", "'0SEND_F2<1': SEND_F names its peer stage after '>'", "0SEND_F2>1"),
        ("0RECV_B2>1", "'0RECV_B2>1': RECV_B names its peer stage after '<'", "0RECV_B2<1"),
        ("2REDUCE0>1", "'2REDUCE0>1': REDUCE names its peer stage after '~'", "2REDUCE0~1"),
        ("2F0>1", "'2F0>1': F has no peer", "2F0"),
        ("2STEP0~1", "'2STEP0~1': STEP has no peer", "2STEP0"),
        ("4F3&3W1", "'4F3&3W1' pairs F with W, but a pair is a forward beside a backward", "a pair like 4F3&3B1"),
        ("4B3&3F1", "'4B3&3F1' pairs B with F, but a pair is a forward beside a backward", "a pair like 4F3&3B1"),
    ],
)
def test_what_is_no_instruction_is_refused_with_one_to_type_instead(text: str, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        parse(text)
    assert caught.value.problem == problem
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("text", ["2F0&", "&3B1", "2F0&3B1&3B2", "2SEND_F0>1&3B1"])
def test_half_a_pair_and_a_pair_of_three_are_refused(text: str) -> None:
    with pytest.raises(ShardwiseError):
        parse(text)


@given(st.text(alphabet="0123FBIWSENDRCV_GATHLO<>~& ", max_size=14))
def test_whatever_is_typed_is_an_instruction_or_a_sentence(text: str) -> None:
    try:
        instruction = parse(text)
    except ShardwiseError:
        return
    assert parse(str(instruction)) == instruction

"""Every error that a user can cause: the command line, its exit status, and the text to the letter."""

import pytest

from shardwise.cli import main

ERRORS: list[tuple[str, int, str]] = [
    # The command line itself.
    (
        "shedule zb-v",
        2,
        """
error: unknown command 'shedule'; known: schedule
  try: shardwise schedule
""",
    ),
    (
        "frobnicate",
        2,
        """
error: unknown command 'frobnicate'; known: schedule
  try: shardwise --help
""",
    ),
    (
        "--verson",
        2,
        """
error: the first word must be a command, not '--verson'; known: schedule
  try: shardwise --version
""",
    ),
    (
        "-x schedule",
        2,
        """
error: the first word must be a command, not '-x'; known: schedule
  try: shardwise --help
""",
    ),
]


@pytest.mark.parametrize(("words", "status", "text"), ERRORS, ids=[words for words, _, _ in ERRORS])
def test_the_error_says_what_is_wrong_and_what_to_type(
    words: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == status
    captured = capsys.readouterr()
    assert captured.err == text.removeprefix("\n")
    assert captured.out == ""

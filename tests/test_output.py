"""Files that a command was told to write: where it was told to, whole, and through nothing else."""

import os
import resource
import stat
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.output import check_output, replacing, save_output, save_outputs, write_whole

SCHEDULE = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--save"]


def test_a_file_is_written_and_written_over_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "made"
    save_output(path, "one")
    path.chmod(0o640)
    save_output(path, "two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_what_is_private_is_so_before_anything_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    with replacing(path, is_private=True) as file:
        (beside,) = [each for each in tmp_path.iterdir() if each != path]
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    write_whole(tmp_path / "made", "before")
    with pytest.raises(TypeError), replacing(tmp_path / "made") as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert (tmp_path / "made").read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_of_several_files_all_are_there_or_none(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with pytest.raises(ShardwiseError, match="second cannot be written: File too large"):
            save_outputs({tmp_path / "first": "short", tmp_path / "second": "long" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "nowhere").symlink_to("none")
    for name, leads in (("link", "there"), ("nowhere", "none")):
        for write in (save_output, write_whole):
            with pytest.raises(ShardwiseError) as caught:
                write(tmp_path / name, "other")
            assert caught.value.problem == f"{tmp_path / name} cannot be written: it is a link to {tmp_path / leads}"
            assert caught.value.remedy == f"{tmp_path / leads} itself"
    assert (tmp_path / "there").read_text() == "mine"
    assert (tmp_path / "link").is_symlink()
    # A folder may be reached by one: the file is where it was told to be.
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").symlink_to("folder")
    save_output(tmp_path / "short" / "made", "here")
    assert (tmp_path / "folder" / "made").read_text() == "here"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
@pytest.mark.parametrize("words", [SCHEDULE, ["data", "stdlib", "--limit", "1kB", "--save"]], ids=["schedule", "data"])
def test_a_device_stays_a_device(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, name]) == 1
    assert f"error: {name} cannot be written: it is a device\n" in capsys.readouterr().err
    assert stat.S_ISCHR(Path(name).stat().st_mode)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ShardwiseError, match="cannot be written: it is a pipe"):
        save_output(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_cannot_be_written_is_told_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="there is no folder") as caught:
        check_output(tmp_path / "none" / "file")
    assert caught.value.remedy == f"mkdir -p {tmp_path / 'none'}"
    with pytest.raises(ShardwiseError, match="is not a file name"):
        check_output(tmp_path / "a\0b")
    # A file system that nobody can write to, whoever runs this.
    with pytest.raises(ShardwiseError, match="/proc/file cannot be written: "):
        check_output(Path("/proc/file"))


@pytest.mark.parametrize(
    "words",
    [
        SCHEDULE,
        ["plan", "llama3-8b", "--cluster", "8xh100", "--batch", "8", "--sequence", "1024", "--save"],
        ["plan", "llama3-8b", "--cluster", "8xh100", "--task", "serve", "--save"],
        ["report", "pp=2,microbatches=2", "--save"],
        ["data", "stdlib", "--save"],
        ["profile", "tiny", "--calibrate"],
        ["convert", "somewhere"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_no_command_writes_through_a_link(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.svg").write_text("mine")
    (tmp_path / "link.svg").symlink_to("there.svg")
    assert main([*words, "link.svg"]) == 1
    assert "link.svg cannot be written: it is a link to there.svg\n" in capsys.readouterr().err
    assert (tmp_path / "there.svg").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.svg", "there.svg"]

"""Deliberate damage to the folder of a checkpoint, and its repair: what disks, copies and people do to files.

Nothing here knows how a checkpoint is read. A damage always changes at least one byte.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

INDEX = "index.json"
_MOST_RANGE = 1 << 16

#: Files by name.
Files = dict[str, bytes]


class DamagedFolder:
    """A folder whose files are kept in memory, to be restored after each damage. `other` is another checkpoint of the
    same run, with files of the same names."""

    def __init__(self, folder: Path, other: Path) -> None:
        self._folder = folder
        self._good, self._other = _read(folder), _read(other)
        self._changed: set[str] = set()

    def damage(self, kind: str, chance: Random) -> None:
        """Damage the folder in this way."""
        while True:
            files = dict(self._good)
            KINDS[kind](files, self._other, chance)
            if files != self._good:
                break
        for name in self._good:
            if files.get(name) != self._good[name]:
                self._put(name, files.get(name))
                self._changed.add(name)

    def restore(self) -> None:
        """Make it whole again."""
        for name in self._changed:
            self._put(name, self._good[name])
        self._changed.clear()

    def _put(self, name: str, content: bytes | None) -> None:
        if content is None:
            (self._folder / name).unlink()
        else:
            (self._folder / name).write_bytes(content)


def _read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _some_file(files: Files, chance: Random) -> str:
    return chance.choice([name for name in files if name != INDEX])


def _range(content: bytes, chance: Random) -> tuple[int, int]:
    start = chance.randrange(len(content))
    return start, min(len(content), start + chance.randint(1, _MOST_RANGE))


def _over(content: bytes, start: int, put: bytes) -> bytes:
    return content[:start] + put + content[start + len(put) :]


def _flipped(content: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(content))
    return _over(content, at, bytes([content[at] ^ 1 << chance.randrange(8)]))


def _flip_bit(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    files[name] = _flipped(files[name], chance)


def _flip_bit_of_header(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    length = 8 + int.from_bytes(files[name][:8], "little")
    files[name] = _flipped(files[name][:length], chance) + files[name][length:]


def _cut_short(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    files[name] = files[name][: chance.randrange(len(files[name]))]


def _lengthen(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    files[_some_file(files, chance)] += chance.randbytes(chance.randint(1, 4096))


def _zero_range(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    start, stop = _range(files[name], chance)
    files[name] = _over(files[name], start, bytes(stop - start))


def _noise(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    start, stop = _range(files[name], chance)
    files[name] = _over(files[name], start, chance.randbytes(stop - start))


def _swap_ranges(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    """Swap two equally long ranges of one file or of two."""
    first, second = _some_file(files, chance), _some_file(files, chance)
    length = chance.choice([512, 4096, 1 << 16])
    if min(len(files[first]), len(files[second])) <= length:
        return
    here, there = (chance.randrange(len(files[name]) - length) for name in (first, second))
    one, other = files[first][here : here + length], files[second][there : there + length]
    files[first] = _over(files[first], here, other)
    files[second] = _over(files[second], there, one)


def _swap_files(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    first, second = _some_file(files, chance), _some_file(files, chance)
    files[first], files[second] = files[second], files[first]


def _file_of_another(files: Files, other: Mapping[str, bytes], chance: Random) -> None:
    name = _some_file(files, chance)
    files[name] = other.get(name, b"")


def _lose_file(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    del files[_some_file(files, chance)]


def _flip_bit_of_index(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    files[INDEX] = _flipped(files[INDEX], chance)


def _change_digit(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    """Replace one digit of the index: it is still JSON, with another content."""
    content = files[INDEX]
    places = [at for at in range(len(content)) if content[at : at + 1].isdigit()]
    files[INDEX] = _over(content, chance.choice(places), str(chance.randrange(10)).encode())


def _cut_index_short(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    files[INDEX] = files[INDEX][: chance.randrange(len(files[INDEX]))]


def _index_of_another(files: Files, other: Mapping[str, bytes], _: Random) -> None:
    files[INDEX] = other[INDEX]


def _all_of_another(files: Files, other: Mapping[str, bytes], _: Random) -> None:
    """Replace the checkpoint by another, under the same name."""
    files.clear()
    files.update(other)


def _edit_index(files: Files, _: Mapping[str, bytes], chance: Random) -> None:
    """Edit as a person or a script might: another value, a box or a tensor removed, two boxes swapped."""
    content = json.loads(files[INDEX])
    entries: dict[str, Any] = content["entries"]
    name, second = chance.choice(sorted(entries)), chance.choice(sorted(entries))
    boxes = entries[name]["boxes"]
    box = chance.choice(boxes)
    edit = chance.randrange(8)
    if edit == 0:
        boxes.remove(box)
    elif edit == 1:
        del entries[name]
    elif edit == 2:
        entries[name], entries[second] = entries[second], entries[name]
    elif edit == 3:
        box[-1] = chance.choice(entries[second]["boxes"])[-1]
    elif edit == 4:
        box[0] = chance.choice([each[0] for entry in entries.values() for each in entry["boxes"]])
    elif edit == 5:
        content["step"] += chance.randint(1, 100)
    elif edit == 6:
        entries[name]["dtype"] = chance.choice(["float32", "float16", "int32", "bfloat16"])
    else:
        content["extra"]["loss_scale"] = chance.random()
    files[INDEX] = json.dumps(content).encode()


KINDS: dict[str, Callable[[Files, Mapping[str, bytes], Random], None]] = {
    "a bit flipped": _flip_bit,
    "a bit of a header flipped": _flip_bit_of_header,
    "a file cut short": _cut_short,
    "a file lengthened": _lengthen,
    "a range of zeros": _zero_range,
    "a range of noise": _noise,
    "two ranges swapped": _swap_ranges,
    "two files swapped": _swap_files,
    "a file of another checkpoint": _file_of_another,
    "a file lost": _lose_file,
    "a bit of the index flipped": _flip_bit_of_index,
    "a digit of the index changed": _change_digit,
    "the index cut short": _cut_index_short,
    "the index of another checkpoint": _index_of_another,
    "the index edited": _edit_index,
    "another checkpoint under this name": _all_of_another,
}

"""The Python and the C reader accept and refuse the same files, over a corpus of broken ones.

Checksums are put right after each change ("sealed"), so that the change itself is what is judged.
"""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from edge_files import BLOCK_BYTES, Image

from edgellm.errors import EdgeLLMError
from edgellm.format import EdgeFile, spec
from edgellm.format.spec import SectionType
from edgellm.types import TensorFormat

Case = tuple[str, bytes]
Compare = Callable[[Iterable[Case]], dict[str, str]]


def accepted(verdicts: dict[str, str]) -> list[str]:
    return [name for name, model_id in verdicts.items() if model_id]


def refused(verdicts: dict[str, str]) -> list[str]:
    return [name for name, model_id in verdicts.items() if not model_id]


def test_both_accept_the_originals(compare: Compare, small: bytes, layered: bytes) -> None:
    assert refused(compare([("small", small), ("layered", layered)])) == []


def test_no_length_but_the_right_one_is_accepted(compare: Compare, layered: bytes) -> None:
    image = Image(layered)
    edges = {spec.SUPERBLOCK_BYTES, len(layered), image.entry(image.num_sections)}
    for number in range(image.num_sections):
        offset, size = image.place(number)
        edges |= {offset, offset + size}
    lengths = {*range(0, 200, 7), *(edge + step for edge in edges for step in (-1, 0, 1, 4096))}
    lengths -= {len(layered)}

    def cases() -> Iterator[Case]:
        for length in sorted(lengths):
            data = layered[:length] + bytes(max(0, length - len(layered)))
            yield f"{length} bytes", data
            if length >= spec.SUPERBLOCK_BYTES + 128:
                yield f"{length} bytes, sealed", Image(data).sealed()

    assert accepted(compare(cases())) == []


def test_every_flipped_bit_is_found_without_its_checksum(compare: Compare, small: bytes) -> None:
    """Weights aside, whose checksums are looked at by `verify`."""
    image = Image(small)
    table_end = image.entry(image.num_sections)
    weights_start, weights_size = image.place(0)
    places = [
        *range(BLOCK_BYTES),
        *range(BLOCK_BYTES, spec.SUPERBLOCK_BYTES, 97),
        *range(spec.SUPERBLOCK_BYTES, table_end, 3),
        *range(table_end, weights_start, 4093),
        *range(weights_start + weights_size, len(small), 11),
    ]
    picks = random.Random(3)

    def cases() -> Iterator[Case]:
        for place in places:
            data = bytearray(small)
            data[place] ^= 1 << picks.randrange(8)
            yield f"byte {place}", bytes(data)

    assert accepted(compare(cases())) == []


def field_values(form: str, now: int) -> list[int]:
    top = 1 << 8 * struct.calcsize("<" + form)
    values = {0, 1, 2, 3, 7, 16, 255, 4096, 65536, top // 2 - 1, top // 2, top - 1, 1 << 31}
    values |= {now - 1, now + 1, now + 8, now + 4096, now + 65536, now * 2, now // 2, top - now}
    return sorted({value % top for value in values} - {now})


SUPERBLOCK_FIELDS = [
    ("major", 0x08, "H"),
    ("superblock_bytes", 0x0C, "I"),
    ("file_size", 0x10, "Q"),
    ("incompatible", 0x18, "Q"),
    ("table", 0x28, "Q"),
    ("entry_size", 0x34, "I"),
    ("num_sections", 0x30, "I"),
    ("zero", 0x38, "Q"),
]
SECTION_FIELDS = [
    ("type", 0, "I"),
    ("flags", 4, "I"),
    ("offset", 8, "Q"),
    ("size", 16, "Q"),
    ("align_log2", 24, "I"),
    ("tag", 64, "B"),
    ("tag_end", 95, "B"),
    ("zero", 96, "B"),
    ("last", 127, "B"),
]
TENSOR_FIELDS = [
    ("name", 0, "B"),
    ("name_end", 63, "B"),
    ("format", 64, "I"),
    ("section", 68, "I"),
    ("rows", 72, "Q"),
    ("cols", 80, "Q"),
    ("offset", 88, "Q"),
    ("size", 96, "Q"),
    ("zero", 104, "B"),
    ("last", 127, "B"),
]


def test_every_superblock_field(compare: Compare, small: bytes) -> None:
    def cases() -> Iterator[Case]:
        for name, place, form in SUPERBLOCK_FIELDS:
            (now,) = struct.unpack_from("<" + form, small, place)
            for value in field_values(form, now):
                data = Image(small).put(place, form, value).sealed(size=False)
                yield f"{name} = {value}", data

    assert accepted(compare(cases())) == []


def test_fields_that_a_later_version_may_set(compare: Compare, small: bytes) -> None:
    cases = [
        (name, Image(small).put(place, form, value).sealed())
        for name, place, form, value in [("minor", 0x0A, "H", 9), ("compatible", 0x20, "Q", 2**63)]
    ]
    assert refused(compare(cases)) == []


def test_every_section_field(compare: Compare, layered: bytes) -> None:
    image = Image(layered)

    def cases() -> Iterator[Case]:
        for number in range(image.num_sections):
            for name, place, form in SECTION_FIELDS:
                start = image.entry(number) + place
                (now,) = struct.unpack_from("<" + form, layered, start)
                for value in field_values(form, now):
                    data = Image(layered).put(start, form, value).sealed()
                    yield f"section {number}: {name} = {value}", data

    # harmless: flags of a known type, an alignment that still holds, an optional section that is
    # now of another kind, a text that takes in zero bytes behind it
    allowed = ["flags = 1", "align_log2", "type =", "tag ="]
    for number in range(image.num_sections - 1):
        offset, size = image.place(number)
        room = range(size + 1, image.place(number + 1)[0] - offset + 1)
        allowed += [f"section {number}: size = {larger}" for larger in room]
    for name in accepted(compare(cases())):
        assert any(word in name for word in allowed), name


def test_every_tensor_field(compare: Compare, layered: bytes) -> None:
    index, size = Image(layered).place(Image(layered).number(SectionType.TENSOR_INDEX))

    def cases() -> Iterator[Case]:
        for start in range(index, index + size, spec.TENSOR_ENTRY_BYTES):
            for name, place, form in TENSOR_FIELDS:
                (now,) = struct.unpack_from("<" + form, layered, start + place)
                for value in field_values(form, now):
                    data = Image(layered).put(start + place, form, value).sealed()
                    yield f"entry {(start - index) // 128}: {name} = {value}", data

    # 39 or 41 rows of `embed` take the same three panels, 63 columns the same two groups
    allowed = ("name", "rows", "cols")
    for name in accepted(compare(cases())):
        assert any(word in name for word in allowed), name


def test_sections_that_overlap_repeat_or_are_missing(compare: Compare, layered: bytes) -> None:
    image = Image(layered)
    entry = spec.SECTION_ENTRY_BYTES

    def moved(source: int, target: int) -> bytes:
        result = Image(layered)
        content = layered[image.entry(source) : image.entry(source) + entry]
        return result.put(image.entry(target), f"{entry}s", content).sealed()

    def cases() -> Iterator[Case]:
        for source in range(image.num_sections):
            for target in range(image.num_sections):
                if source != target:
                    yield f"{source} copied over {target}", moved(source, target)
            start = image.entry(source)
            yield f"{source} unknown", Image(layered).put(start, "I", 99).sealed()
            yield f"{source} must", Image(layered).put(start, "II", 99, 1).sealed()
            shorter = Image(layered).put(0x30, "I", image.num_sections - 1)
            yield f"without the last {source}", shorter.sealed()

    kept = accepted(compare(cases()))
    optional = {
        image.number(SectionType.CHAT_TEMPLATE),
        image.number(SectionType.GENERATION_CONFIG),
    }
    assert kept == [f"{number} unknown" for number in sorted(optional)]


def test_padding_must_be_zero(compare: Compare, layered: bytes) -> None:
    image = Image(layered)
    places = [BLOCK_BYTES, spec.SUPERBLOCK_BYTES - 1, image.entry(image.num_sections)]
    for number in range(1, image.num_sections):
        end = sum(image.place(number - 1))
        if image.place(number)[0] > end:
            places += [end, image.place(number)[0] - 1]
    cases = [(f"byte {place}", Image(layered).put(place, "B", 1).sealed()) for place in places]
    assert len(cases) > 5
    assert accepted(compare(cases)) == []


def test_verify_is_the_same_in_both(
    native_tool: Callable[[str], Path], layered: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.edge"
    places = [
        (section.offset, section.label)
        for section in _open(path, layered).sections
        if section.type == SectionType.WEIGHTS
    ]
    gap = places[0][0] + spec.tensor_bytes(TensorFormat.E4, 40, 64)
    for place, label in [*places, (gap, "WEIGHTS globals")]:
        for sealed in (False, True):
            image = Image(layered).put(place, "B", layered[place] ^ 1)
            path.write_bytes(image.sealed() if sealed else bytes(image.data))
            done = subprocess.run(
                [native_tool("check_file"), "--verify", path], capture_output=True, text=True
            )
            is_good = sealed and place != gap
            assert done.stdout.startswith("ok ") == is_good
            if is_good:
                EdgeFile.open(path, verify=True).close()
            else:
                assert label in done.stdout
                with pytest.raises(EdgeLLMError, match=label):
                    EdgeFile.open(path, verify=True)


def _open(path: Path, data: bytes) -> EdgeFile:
    path.write_bytes(data)
    return EdgeFile.open(path)


def test_running_out_of_memory_is_an_error_and_loses_nothing(
    native_tool: Callable[[str], Path], layered: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.edge"
    path.write_bytes(layered)
    done = subprocess.run(
        [native_tool("check_file"), "--starve", path], capture_output=True, text=True
    )
    assert done.stdout == "ok 5\n"

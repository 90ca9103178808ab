"""The Python and the C reader accept and refuse the same files, over a corpus of broken ones.

Checksums are put right after each change ("sealed"), so that the change itself is what is judged.
"""

from __future__ import annotations

import functools
import random
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_files import BLOCK_BYTES, META, Image, changed_meta, write_edge

from edgellm.errors import EdgeLLMError
from edgellm.format import EdgeFile, spec
from edgellm.format.meta import canonical_json
from edgellm.format.spec import SectionType
from edgellm.types import TensorFormat

Case = tuple[str, bytes]
Compare = Callable[[Iterable[Case]], dict[str, str]]

_BATCH = 64


@pytest.fixture
def compare(native_tool: Callable[[str], Path], tmp_path: Path) -> Compare:
    """Opens each case with both readers; returns name -> model id, or "" if both refused it."""
    program = native_tool("check_file")

    def in_python(path: Path) -> tuple[str, str]:
        try:
            with EdgeFile.open(path) as file:
                return file.model_id, ""
        except EdgeLLMError as error:
            return "", str(error)

    def run(cases: Iterable[Case]) -> dict[str, str]:
        verdicts: dict[str, str] = {}
        pending = list(cases)
        while pending:
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            paths = [tmp_path / f"{number}.edge" for number in range(len(batch))]
            for path, (_, data) in zip(paths, batch, strict=True):
                path.write_bytes(data)
            done = subprocess.run([program, *paths], capture_output=True, text=True, timeout=60)
            assert done.returncode in (0, 1), done.stderr
            lines = done.stdout.splitlines()
            assert len(lines) == len(batch), "one line each"
            for path, (name, _), line in zip(paths, batch, lines, strict=True):
                model_id, message = in_python(path)
                in_c = line.removeprefix("ok ") if line.startswith("ok ") else ""
                assert in_c == model_id, f"{name}: C says {line!r}, Python {message or 'ok'!r}"
                assert "\n" not in message
                verdicts[name] = model_id
        return verdicts

    return run


@functools.cache
def original(folder: Path, num_tensors: int) -> bytes:
    path = folder / "original.edge"
    write_edge(path, num_tensors)
    return path.read_bytes()


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    """A file with one WEIGHTS section."""
    return original(tmp_path, 2)


@pytest.fixture
def layered(tmp_path: Path) -> bytes:
    """A file with three WEIGHTS sections."""
    return original(tmp_path, 5)


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


def with_meta(small: bytes, text: bytes) -> bytes:
    return Image(small).replace_section(SectionType.META, text).sealed()


def test_model_members(compare: Compare, small: bytes) -> None:
    """Both read `model`; the rest of META is Python's alone and stays valid here."""
    odd: list[Any] = [..., None, True, 0, -1, 1, 3, 17, 2**31, 2**63 - 1, -(2**63), 0.5, 1e-99]
    odd += [1e99, "", "silu", "x" * 32, "ünicode", "a\0b", [], {}, [[]], [1, 2]]
    layer: list[Any] = [..., None, -1, 1, 2**24, 2**24 + 1, 2**40, 0.0, "0", []]

    no_ids = {**META["tokenizer"], "add_bos": False, "bos_id": None, "eos_ids": []}

    def cases() -> Iterator[Case]:
        for key in META["model"]:
            for value in odd:
                text = canonical_json(changed_meta(tokenizer=no_ids, **{f"model__{key}": value}))
                yield f"{key} = {value!r}", with_meta(small, text)
        for key in ("rope", "window"):
            for value in layer:
                meta = changed_meta()
                if value is ...:
                    del meta["model"]["layers"][1][key]
                else:
                    meta["model"]["layers"][1][key] = value
                yield f"layer {key} = {value!r}", with_meta(small, canonical_json(meta))

    kept = accepted(compare(cases()))
    assert "attention_scale = 0.5" in kept
    assert "layer window = 16777216" in kept
    assert not any("None" in name or "Ellipsis" in name for name in kept)


GOOD_JSON = [
    b"0",
    b"-0",
    b"-0.0",
    b"1E+05",
    b"1234567890123456.5",
    b"0.1234567890123456",
    b"9223372036854775807",
    b"-9223372036854775808",
    b" \t\r\n[ ]",
    b'{ "a" : { } , "b" : [ 1 , "" ] }',
    b'"\\u00e9\\ud83d\\ude00\\/\\b\\f\\u0000"',
    '"\u00e9\u2603\U0001f600\U0010ffff"'.encode(),
    b'{"\\u0061":1,"b":2}',
    b'{"":1,"\\u0000":2,"a":3,"aa":4,"b":5}',
    '{"z":1,"\u00e9":2,"\ufffd":3,"\U0001f600":4}'.encode(),
    b"[" * 31 + b"1" + b"]" * 31,
]
BAD_JSON = [
    b"",
    b"tru",
    b"nulll",
    b"+1",
    b"-",
    b"01",
    b"1.",
    b".5",
    b"1e",
    b"1e+",
    b"1e100",
    b"0x10",
    b"NaN",
    b"Infinity",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"123456789012345678.5",
    b"1" * 400,
    b"[1,]",
    b"[1 2]",
    b"[1",
    b"]",
    b'{"a"}',
    b'{"a":}',
    b'{"a":1,}',
    b"{1:2}",
    b"{'a':1}",
    b'{"a":1,"a":1}',
    b'{"a":1,"\\u0061":1}',
    b'{"b":1,"a":2}',
    '{"\U0001f600":1,"\ufffd":2}'.encode(),
    b'"',
    b'"\\',
    b'"\\x"',
    b'"\\u12"',
    b'"\\u12g4"',
    b'"\\ud800"',
    b'"\\ud800\\u0041"',
    b'"\\udc00"',
    b'"\n"',
    b'"\x7f\x1f"',
    b'"\xff"',
    b'"\xc0\x80"',
    b'"\xc1\xbf"',
    b'"\xe0\x9f\xbf"',
    b'"\xed\xa0\x80"',
    b'"\xf0\x8f\xbf\xbf"',
    b'"\xf4\x90\x80\x80"',
    b'"\xe2\x98"',
    b"/**/1",
    b"1 // x",
    b"\xef\xbb\xbf1",
    b"1\0",
    b"[" * 32 + b"]" * 32,
    b'{"a":' * 32 + b"1" + b"}" * 32,
    b"[" * 200_000,
]


def embedded(small: bytes, value: bytes) -> bytes:
    """META with `value` as its first member, one level down."""
    return with_meta(small, b'{"a":' + value + b"," + canonical_json(META)[1:])


def test_json_texts(compare: Compare, small: bytes) -> None:
    good = [(f"good {text[:40]!r}", embedded(small, text)) for text in GOOD_JSON]
    bad = [(f"bad {text[:40]!r}", embedded(small, text)) for text in BAD_JSON]
    verdicts = compare([*good, *bad])
    assert [name for name in refused(verdicts) if name.startswith("good")] == []
    assert [name for name in accepted(verdicts) if name.startswith("bad")] == []


def test_a_member_may_be_spelled_with_escapes(compare: Compare, small: bytes) -> None:
    text = canonical_json(META).replace(b'"model"', b'"\\u006dod\\u0065l"')
    text = text.replace(b'"llama"', b'"ll\\u0061ma"')
    assert refused(compare([("escaped", with_meta(small, text))])) == []


def test_random_damage_of_meta_and_index(compare: Compare, small: bytes) -> None:
    picks = random.Random(11)
    image = Image(small)
    tokens = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"9", b"-", b".", b"e", b" "]

    def damaged(text: bytes) -> bytes:
        data = bytearray(text)
        for _ in range(picks.randint(1, 3)):
            place = picks.randrange(len(data))
            choice = picks.randrange(3)
            if choice == 0:
                data[place] = picks.randrange(256)
            elif choice == 1:
                data[place : place + 1] = picks.choice(tokens)
            else:
                del data[place : place + picks.randint(1, 4)]
        return bytes(data)

    def cases() -> Iterator[Case]:
        # the part that both read: Python alone judges tokenizer, quantization, source and rope
        text = canonical_json(META)
        start = text.index(b'"model"')
        end = text.index(b',"quantization"')
        for number in range(800):
            broken = text[:start] + damaged(text[start:end]) + text[end:]
            yield f"meta {number}: {broken[start:]!r}", with_meta(small, broken)
        start, size = image.place(image.number(SectionType.TENSOR_INDEX))
        for number in range(400):
            index = bytearray(small[start : start + size])
            for _ in range(picks.randint(1, 2)):
                index[picks.randrange(size)] ^= 1 << picks.randrange(8)
            changed = Image(small).replace_section(SectionType.TENSOR_INDEX, bytes(index))
            yield f"index {number}", changed.sealed()

    verdicts = compare(cases())
    assert len(verdicts) == 1200


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


def test_c_reads_the_float32_that_was_written(
    native_tool: Callable[[str], Path], small: bytes, tmp_path: Path
) -> None:
    """The shortest decimal of a float32 gives that float32 back, without the C library's strtod."""
    random_bits = np.random.default_rng(5).integers(0x35A00000, 0x49700000, (40, 3))
    scales = random_bits.astype(np.uint32).view(np.float32)
    scales[:, 0] = np.minimum(scales[:, 0], 1)
    scales[0] = [1e-12, 1e-6, 1e6]
    scales[1] = [1e-5, np.sqrt(np.float32(640)), 2 / 3]
    paths = []
    for number, (eps, attention, embedding) in enumerate(scales):
        meta = changed_meta(model__norm_eps=float(str(eps)))
        meta["model"]["attention_scale"] = float(str(attention))
        meta["model"]["embedding_scale"] = float(str(embedding))
        paths.append(tmp_path / f"{number}.edge")
        paths[-1].write_bytes(with_meta(small, canonical_json(meta)))
    done = subprocess.run(
        [native_tool("check_file"), "--floats", *paths], capture_output=True, text=True
    )
    read = [[float.fromhex(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert np.array_equal(np.array(read, np.float32), scales)


def test_running_out_of_memory_is_an_error_and_loses_nothing(
    native_tool: Callable[[str], Path], layered: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.edge"
    path.write_bytes(layered)
    done = subprocess.run(
        [native_tool("check_file"), "--starve", path], capture_output=True, text=True
    )
    assert done.stdout == "ok 5\n"

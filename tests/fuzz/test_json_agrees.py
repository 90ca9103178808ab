"""The Python and the C reader agree on JSON and on META's `model`."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from edge_files import META, Image, changed_meta

from edgellm.format.meta import canonical_json
from edgellm.format.spec import SectionType

Case = tuple[str, bytes]
Compare = Callable[[Iterable[Case]], dict[str, str]]


def accepted(verdicts: dict[str, str]) -> list[str]:
    return [name for name, model_id in verdicts.items() if model_id]


def refused(verdicts: dict[str, str]) -> list[str]:
    return [name for name, model_id in verdicts.items() if not model_id]


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

"""Reader of ONNX model files that trusts nothing in them.

The protobuf is read where it lies, in a map of the file: weights are noted by place and size, never
copied, and what is built is counted against limits while it is read, which the protobuf package
cannot do. Only what an inference graph needs is kept.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3 for field numbers;
https://protobuf.dev/programming-guides/encoding for the encoding.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.onnx_types import (
    DOUBLE,
    FLOAT,
    ITEM_BITS,
    OnnxGraph,
    OnnxNode,
    OnnxTensor,
    Span,
)

Buffer: TypeAlias = bytes | mmap.mmap

MAX_FILE_BYTES: Final = 2**31  # protobuf's own
MAX_FIELDS: Final = 4_000_000
MAX_NODES: Final = 262_144
MAX_INITIALIZERS: Final = 65_536
MAX_TEXT_BYTES: Final = 4096
MAX_LIST: Final = 65_536
MAX_DIMS: Final = 8
MAX_ELEMENTS: Final = 2**40
OPSETS: Final = range(11, 29)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class _Parts:
    """A model or graph while it is read."""

    nodes: list[OnnxNode] = field(default_factory=list)
    initializers: dict[str, OnnxTensor] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    opsets: dict[str, int] = field(default_factory=dict)


def parse_model(data: Buffer, where: str) -> OnnxGraph:
    """Reads an ONNX model.

    Args:
        data: The file.
        where: Its name, for messages.

    Returns:
        The graph.

    Raises:
        FormatError: It is not an ONNX model, or a broken one.
        UnsupportedModelError: It is a training graph, has functions, or is of another opset.
    """
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"{where} is larger than {MAX_FILE_BYTES} bytes, the limit of ONNX files")
    return _Reader(data, where).model()


class _Reader:
    """Walks the messages; every field counts against one limit."""

    def __init__(self, data: Buffer, where: str) -> None:
        self._data = data
        self._where = where
        self._num_fields = 0

    def model(self) -> OnnxGraph:
        """The whole file as a ModelProto."""
        parts = _Parts()
        graph: Span | None = None
        for number, value in self._fields((0, len(self._data))):
            if number == 7:
                if graph is not None:
                    raise self._broken("holds two graphs")
                graph = self._span(value)
            elif number == 8:
                self._opset(parts, self._span(value))
            elif number == 20:
                raise UnsupportedModelError(
                    f"{self._where} is a training graph: export the model for inference"
                )
            elif number == 25:
                raise UnsupportedModelError(
                    f"{self._where} has local functions: inline them with "
                    "onnx.inliner.inline_local_functions and save it again"
                )
        if graph is None or not parts.opsets:
            raise FormatError(f"{self._where} is not an ONNX model")
        self._graph(parts, graph)
        version = parts.opsets.get("", parts.opsets.get("ai.onnx", OPSETS[0]))
        if version not in OPSETS or parts.opsets.get("com.microsoft", 1) != 1:
            raise UnsupportedModelError(
                f"{self._where} uses operator set {version}; edgellm reads {OPSETS[0]} to "
                f"{OPSETS[-1]}, and 1 of com.microsoft: export it with another opset"
            )
        return OnnxGraph(
            nodes=tuple(parts.nodes),
            initializers=parts.initializers,
            inputs=tuple(parts.inputs),
            outputs=tuple(parts.outputs),
        )

    def _opset(self, parts: _Parts, span: Span) -> None:
        domain, version = "", 0
        for number, value in self._fields(span):
            if number == 1:
                domain = self._text(value)
            elif number == 2:
                version = self._int(value)
        parts.opsets[domain] = version

    def _graph(self, parts: _Parts, span: Span) -> None:
        for number, value in self._fields(span):
            if number == 1:
                parts.nodes.append(self._node(self._span(value)))
                self._limit("nodes", len(parts.nodes), MAX_NODES)
            elif number == 5:
                tensor = self._tensor(self._span(value))
                if tensor.name in parts.initializers or not tensor.name:
                    raise self._broken(f"has two initialisers of the name {tensor.name[:80]!r}")
                parts.initializers[tensor.name] = tensor
                self._limit("initialisers", len(parts.initializers), MAX_INITIALIZERS)
            elif number in (11, 12):
                names = parts.inputs if number == 11 else parts.outputs
                names.append(self._name(self._span(value)))
                self._limit("inputs or outputs", len(names), MAX_LIST)
            elif number == 15:
                raise UnsupportedModelError(f"{self._where} has sparse initialisers")

    def _node(self, span: Span) -> OnnxNode:
        texts = {3: "", 4: "", 7: ""}
        names: dict[int, list[str]] = {1: [], 2: []}
        attributes: dict[str, Any] = {}
        for number, value in self._fields(span):
            if number in texts:
                texts[number] = self._text(value)
            elif number in names:
                names[number].append(self._text(value))
            elif number == 5:
                name, content = self._attribute(self._span(value))
                if name in attributes:
                    raise self._broken(f"has a node with two attributes {name[:80]!r}")
                attributes[name] = content
        return OnnxNode(
            op=texts[4],
            domain="" if texts[7] == "ai.onnx" else texts[7],
            name=texts[3],
            inputs=tuple(names[1]),
            outputs=tuple(names[2]),
            attributes=attributes,
        )

    def _attribute(self, span: Span) -> tuple[str, Any]:
        name, kind = "", 0
        content: float | bytes | OnnxTensor | None = None
        ints: list[int] = []
        for number, value in self._fields(span):
            if number == 1:
                name = self._text(value)
            elif number == 20:
                kind = self._int(value)
            elif number == 2:
                content = float(struct.unpack("<f", self._raw(value, 4))[0])
            elif number == 3:
                content = self._int(value)
            elif number == 4:
                begin, end = self._span(value)
                content = self._data[begin : min(end, begin + MAX_TEXT_BYTES)]
            elif number == 5:
                content = self._tensor(self._span(value))
            elif number == 8:
                ints += self._ints(value)
                self._limit("numbers of an attribute", len(ints), MAX_LIST)
        # Writers of proto3 leave out a number that is zero.
        zero = {1: 0.0, 2: 0}.get(kind)
        return name, ints or (zero if content is None else content)

    def _tensor(self, span: Span) -> OnnxTensor:
        name, kind, shape = "", 0, list[int]()
        external: dict[str, str] = {}
        spans: dict[int, Span] = {}
        is_external = False
        for number, value in self._fields(span):
            if number == 1:
                shape += self._ints(value)
                self._limit(f"dimensions of tensor {name[:80]!r}", len(shape), MAX_DIMS)
            elif number == 2:
                kind = self._int(value)
            elif number == 8:
                name = self._text(value)
            elif number in (4, 5, 7, 9, 10):
                spans[number] = self._packed(spans.get(number), value, name)
            elif number == 13:
                self._external(external, self._span(value), name)
            elif number == 14:
                is_external = self._int(value) == 1
            elif number == 3:
                raise self._broken(f"has tensor {name[:80]!r} in segments")
        if not all(0 <= size <= MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
            raise self._broken(f"has tensor {name[:80]!r} of impossible shape {shape}")
        if is_external and spans:
            raise self._broken(f"has tensor {name[:80]!r} both here and in another file")
        span_of = spans.get(9) or spans.get({FLOAT: 4, DOUBLE: 10}.get(kind, 9))
        tensor = OnnxTensor(
            name=name,
            type=kind,
            shape=tuple(shape),
            span=span_of,
            varints=spans.get(7) or spans.get(5),
            external=external if is_external else None,
        )
        if span_of and kind in ITEM_BITS and span_of[1] - span_of[0] != tensor.size:
            raise self._broken(
                f"has {span_of[1] - span_of[0]} bytes for tensor {name[:80]!r}, whose shape "
                f"{shape} takes {tensor.size}"
            )
        return tensor

    def _external(self, entries: dict[str, str], span: Span, name: str) -> None:
        key = value = ""
        for number, content in self._fields(span):
            if number == 1:
                key = self._text(content)
            elif number == 2:
                value = self._text(content)
        if key in entries or len(entries) >= MAX_DIMS:
            raise self._broken(f"says twice where tensor {name[:80]!r} lies")
        entries[key] = value

    def _packed(self, before: Span | None, value: int | Span, name: str) -> Span:
        if before is not None or isinstance(value, int):
            raise self._broken(
                f"holds tensor {name[:80]!r} number by number: load it and save it with the onnx "
                "package"
            )
        return value

    def _name(self, span: Span) -> str:
        """`name` of a ValueInfoProto."""
        return next((self._text(v) for number, v in self._fields(span) if number == 1), "")

    def _fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        """Field numbers and values of a message; a fixed-size value is the span of its bytes."""
        at, end = span
        while at < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise self._broken(f"has more than {MAX_FIELDS} protobuf fields")
            key, at = self._varint(at, end)
            number, kind = key >> 3, key & 7
            value: int | Span
            if kind == _VARINT:
                value, at = self._varint(at, end)
            else:
                if kind == _BYTES:
                    size, at = self._varint(at, end)
                elif kind in (_FIXED32, _FIXED64):
                    size = 4 if kind == _FIXED32 else 8
                else:
                    raise FormatError(f"{self._where} is not an ONNX model, or is damaged")
                if size > end - at:
                    raise FormatError(
                        f"{self._where} is not an ONNX model, or is truncated: a field at byte "
                        f"{at} claims {size} bytes"
                    )
                value = (at, at + size)
                at += size
            yield number, value

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        result = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result & (2**64 - 1), at
            shift += 7
        raise FormatError(f"{self._where} is not an ONNX model, or is damaged")

    def _ints(self, value: int | Span) -> list[int]:
        """One element of a repeated int64, or all of them packed."""
        if isinstance(value, int):
            return [_signed(value)]
        return decode_varints(self._data, value, MAX_LIST, self._where)

    def _int(self, value: int | Span) -> int:
        if not isinstance(value, int):
            raise FormatError(f"{self._where} is not an ONNX model, or is damaged")
        return _signed(value)

    def _span(self, value: int | Span) -> Span:
        if isinstance(value, int):
            raise FormatError(f"{self._where} is not an ONNX model, or is damaged")
        return value

    def _raw(self, value: int | Span, size: int) -> bytes:
        begin, end = self._span(value)
        if end - begin != size:
            raise FormatError(f"{self._where} is not an ONNX model, or is damaged")
        return self._data[begin:end]

    def _text(self, value: int | Span) -> str:
        begin, end = self._span(value)
        if end - begin > MAX_TEXT_BYTES:
            raise self._broken(f"has a name of {end - begin} bytes")
        try:
            return self._data[begin:end].decode()
        except UnicodeDecodeError:
            raise self._broken("has a name that is not UTF-8") from None

    def _limit(self, what: str, number: int, maximum: int) -> None:
        if number > maximum:
            raise self._broken(f"has more than {maximum} {what}")

    def _broken(self, what: str) -> FormatError:
        return FormatError(f"{self._where} {what}")


def decode_varints(data: Buffer, span: Span, maximum: int, where: str) -> list[int]:
    """Decodes packed int32 or int64 numbers.

    Args:
        data: The file.
        span: First byte and end of the numbers.
        maximum: How many there may be.
        where: The file's name, for messages.

    Raises:
        FormatError: There are more, or the last one is cut off.
    """
    numbers: list[int] = []
    number = shift = 0
    for byte in data[span[0] : min(span[1], span[0] + 10 * maximum + 1)]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(_signed(number & (2**64 - 1)))
            number = shift = 0
        if shift > 63 or len(numbers) > maximum:
            raise FormatError(
                f"{where}: a list of numbers at byte {span[0]} is too long or damaged"
            )
    if shift or (span[1] - span[0]) > 10 * maximum:
        raise FormatError(f"{where}: a list of numbers at byte {span[0]} is too long or damaged")
    return numbers


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

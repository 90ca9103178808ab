"""What a walk over an ONNX graph knows: where weights are met, and what each value comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.onnx_constants import Constant, Constants, broken
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_types import DOUBLE, OnnxNode, OnnxTensor
from edgellm.exporters.onnx_weights import FLOATS, Weight
from edgellm.format.spec import MAX_LAYERS

# "power" is a square or cube or made of one, "mean" a mean square or made of one, "normed" a value
# divided by its root; "scores" and "probabilities" are an attention's, "sigmoid" is a gate's.
Kind: TypeAlias = Literal["plain", "power", "mean", "normed", "scores", "probabilities", "sigmoid"]
SiteKind: TypeAlias = Literal["embedding", "linear", "norm", "sum"]

MAX_SITES: Final = 16 * MAX_LAYERS
_MAX_SOURCES: Final = 8
_MAX_NODES: Final = 64  # between a node and the constants that its inputs are made of


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    """A place where hidden values meet a weight, or each other.

    Attributes:
        kind: What happens; a "sum" has no weight.
        node: Which node does it, for messages.
        inputs: The sites whose values go in.
        weight: (rows, cols) of a matrix, (n,) of a norm.
        bias: Added to a linear layer's result.
        activation: What a linear layer's result goes through.
        epsilon: A norm's.
        scale: What the embedding is multiplied by, None if it is not known.
    """

    kind: SiteKind
    node: str
    inputs: frozenset[Site] = frozenset()
    weight: Weight | None = None
    bias: Weight | None = None
    activation: str | None = None
    epsilon: float | None = None
    scale: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Attention:
    """An attention: where queries, keys and values come from.

    `options` are the attributes and `rope` the caches (cosine, sine) of a fused one; `scale` is
    what the scores of another are multiplied by, None if it is not known. `turned` is what turns
    queries and keys, see `Value`.
    """

    node: str
    query: frozenset[Site]
    key: frozenset[Site]
    value: frozenset[Site] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    rope: tuple[Constant, Constant] | None = None
    scale: float | None = None
    turned: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A hidden value: the sites it comes from, with nothing between that is a site.

    `linear` is the layer whose result it is, as it is; `attention` that of scores; `epsilon` what
    was added to a mean; `scale` what it was multiplied by since its sites, None if that is not
    known; `turned` names the angles, or the result of the node, that RoPE turned it by.
    """

    sites: frozenset[Site]
    kind: Kind = "plain"
    linear: Site | None = None
    attention: Attention | None = None
    epsilon: float | None = None
    scale: float | None = 1.0
    turned: str = ""

    def times(self, number: float | None) -> Value:
        """The value multiplied by a number, None if it is not known."""
        scale = None if self.scale is None or number is None else self.scale * number
        return dataclasses.replace(self, linear=None, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """What a graph was found to hold; `outputs` are hidden values that it returns."""

    sites: tuple[Site, ...]
    attentions: tuple[Attention, ...]
    outputs: tuple[Value, ...]


class Walk:
    """The state of a walk.

    Attributes:
        file: The model.
        constants: What of it does not depend on the input.
        values: The hidden values found so far, by name.
        sites: The sites, in order of computation.
        attentions: The attentions, likewise.
    """

    def __init__(self, file: OnnxModelFile) -> None:
        self.file = file
        self.constants = Constants(file)
        self.values: dict[str, Value] = {}
        self.sites: list[Site] = []
        self.attentions: list[Attention] = []
        self._makers = {name: node for node in file.graph.nodes for name in node.outputs}

    def has_weights(self, node: OnnxNode) -> bool:
        """Whether an input that is not hidden is made of several floats of the file.

        What is under a cosine or sine is not, that is RoPE.
        """
        names = [name for name in node.inputs if name and name not in self.values]
        return any(
            math.prod(tensor.shape) > 1
            for tensor in constants_before(self.file, self._makers, names, ("Cos", "Sin"))
        )

    def angles(self, node: OnnxNode) -> str:
        """The angles of the cosine or sine that an input which is not hidden is made of."""
        waiting = [name for name in node.inputs if name and name not in self.values]
        seen = set(waiting)
        for name in waiting:  # which grows
            maker = self._makers.get(name)
            if maker is not None and maker.op in ("Cos", "Sin"):
                return "".join(maker.inputs[:1])
            if maker is not None and len(seen) < _MAX_NODES:
                waiting += [other for other in maker.inputs if other not in seen]
                seen.update(maker.inputs)
        return ""

    def sum(self, node: OnnxNode, left: Value, right: Value) -> Value:
        """Of two values of the same sites, one that comes from there; else a sum of branches."""
        value = self.union(node, [left, right])
        if left.sites == right.sites:
            return value
        if not left.kind == right.kind == "plain":
            raise self.unknown(node, f"of {left.kind} and {right.kind} values")
        self.unscaled(node, left)
        self.unscaled(node, right)
        site = self.site(node, "sum", value.sites, None)
        return Value(sites=frozenset((site,)))

    def union(self, node: OnnxNode, values: list[Value]) -> Value:
        """A value that comes from the sites of several, of the first kind that is not plain."""
        sites = values[0].sites.union(*(value.sites for value in values[1:]))
        if len(sites) > _MAX_SOURCES:
            raise self.unknown(node, f"of more than {_MAX_SOURCES} layers at once")
        special = next((value for value in values if value.kind != "plain"), None)
        # RoPE joins halves, of which one is negated
        scales = {None if value.scale is None else abs(value.scale) for value in values}
        scale = next(iter(scales)) if len(scales) == 1 else None
        if len(values) == 1:
            scale = values[0].scale
        turned = next((value.turned for value in values if value.turned), "")
        return dataclasses.replace(
            special or values[0], sites=sites, linear=None, scale=scale, turned=turned
        )

    def unscaled(self, node: OnnxNode, value: Value) -> Value:
        """The value if it is what its sites made; notes what an embedding is multiplied by."""
        (site, *others) = value.sites
        if site.kind == "embedding" and not others:
            if any(one.inputs == value.sites for one in self.sites) and site.scale != value.scale:
                raise self.unknown(node, "of the embedding, multiplied by another number,")
            site.scale = value.scale
        elif value.scale is not None and not math.isclose(value.scale, 1, rel_tol=1e-3):
            raise self.unknown(node, f"of values that were multiplied by {value.scale:.4g}")
        return value

    def split(self, linear: Site, sizes: list[int]) -> tuple[Value, ...]:
        """A linear layer as layers of `sizes` rows each, which take its place."""
        if linear not in self.sites:
            raise FormatError(f"{self.file.path}: {linear.node} is split twice")
        at = self.sites.index(linear)
        first, parts = 0, list[Site]()
        for size in sizes:
            part = Site(kind="linear", node=linear.node, inputs=linear.inputs)
            part.weight = linear.weight and linear.weight.part(first, size)
            part.bias = linear.bias and linear.bias.part(first, size)
            parts.append(part)
            first += size
        self.sites[at : at + 1] = parts
        return tuple(Value(sites=frozenset((part,)), linear=part) for part in parts)

    def site(
        self,
        node: OnnxNode,
        kind: SiteKind,
        inputs: Iterable[Site],
        weight: Weight | None,
    ) -> Site:
        """Notes a new site."""
        site = Site(kind=kind, node=str(node), inputs=frozenset(inputs), weight=weight)
        self.sites.append(site)
        if len(self.sites) > MAX_SITES:
            raise broken(self.file, node, f"is one of more than {MAX_SITES} layers")
        return site

    def unknown(self, node: OnnxNode, how: str) -> UnsupportedModelError:
        """The error that a node does what no supported decoder does."""
        return UnsupportedModelError(f"{self.file.path}: {node} {how} is not supported")


def constants_before(
    file: OnnxModelFile,
    makers: Mapping[str, OnnxNode],
    names: Iterable[str],
    stops: tuple[str, ...] = (),
) -> Iterator[OnnxTensor]:
    """Constants of floats that values are made of, those of the nearest nodes.

    Args:
        file: The model.
        makers: The node of each value.
        names: The values.
        stops: Operations whose inputs do not count.
    """
    waiting = list(names)
    seen = set(waiting)
    for name in waiting:  # which grows
        tensor = file.graph.initializers.get(name)
        node = makers.get(name)
        if node is not None and isinstance(node.attributes.get("value"), OnnxTensor):
            tensor = node.attributes["value"]
        if tensor is not None:
            if tensor.type in (*FLOATS, DOUBLE):
                yield tensor
        elif node is not None and node.op not in stops and len(seen) < _MAX_NODES:
            waiting += [other for other in node.inputs if other and other not in seen]
            seen.update(node.inputs)

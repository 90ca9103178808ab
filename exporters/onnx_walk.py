"""What a walk over an ONNX graph knows: where weights are met, and what each value comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from edgellm.errors import UnsupportedModelError
from edgellm.exporters.onnx_constants import Constant, Constants, broken
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_types import DOUBLE, OnnxNode, OnnxTensor
from edgellm.exporters.onnx_weights import FLOATS, Weight
from edgellm.format.spec import MAX_LAYERS

# "mean" is a mean square or something made of one, "normed" a value divided by its root; "scores"
# and "probabilities" are those of an attention.
Kind: TypeAlias = Literal["plain", "mean", "normed", "scores", "probabilities"]
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
    """

    kind: SiteKind
    node: str
    inputs: frozenset[Site] = frozenset()
    weight: Weight | None = None
    bias: Weight | None = None
    activation: str | None = None
    epsilon: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Attention:
    """An attention: where queries, keys and values come from.

    `options` are the attributes and `rope` the caches (cosine, sine) of a fused one.
    """

    node: str
    query: frozenset[Site]
    key: frozenset[Site]
    value: frozenset[Site] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    rope: tuple[Constant, Constant] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A hidden value: the sites it comes from, with nothing between that is a site.

    `linear` is the layer whose result it is, as it is; `attention` that of scores; `epsilon` what
    was added to a mean.
    """

    sites: frozenset[Site]
    kind: Kind = "plain"
    linear: Site | None = None
    attention: Attention | None = None
    epsilon: float | None = None


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

    def sum(self, node: OnnxNode, left: Value, right: Value) -> Value:
        """Of two values of the same sites, one that comes from there; else a sum of branches."""
        value = self.union(node, [left, right])
        if left.sites == right.sites:
            return value
        if not left.kind == right.kind == "plain":
            raise self.unknown(node, f"of {left.kind} and {right.kind} values")
        site = self.site(node, "sum", value.sites, None)
        return Value(sites=frozenset((site,)))

    def union(self, node: OnnxNode, values: list[Value]) -> Value:
        """A value that comes from the sites of several, of the first kind that is not plain."""
        sites = values[0].sites.union(*(value.sites for value in values[1:]))
        if len(sites) > _MAX_SOURCES:
            raise self.unknown(node, f"of more than {_MAX_SOURCES} layers at once")
        special = next((value for value in values if value.kind != "plain"), None)
        return dataclasses.replace(special or values[0], sites=sites, linear=None)

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

"""Recognises the layers of a decoder among the sites of an ONNX graph.

By connections alone: the stream of hidden values starts at the embedding and grows by a sum for
each attention and each feed-forward part; what leads from one sum to the next has one shape. Which
of three layers is the query's is seen at the attention, which of two is the gate at the activation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgellm.errors import FormatError
from edgellm.exporters.onnx_walk import Attention, Site, SiteKind, Sites
from edgellm.exporters.onnx_weights import Weight
from edgellm.format.spec import MAX_LAYERS


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer: its sites by role ("attn_norm", "q" ...) and its attention."""

    sites: Mapping[str, Site]
    attention: Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder as the graph has it."""

    embed: Site
    layers: tuple[DecoderLayer, ...]
    final_norm: Site
    head: Site

    def roles(self) -> dict[str, Site]:
        """Its sites by canonical name: "embed", "layers.0.q" ..., "final_norm", "head"."""
        layers = {
            f"layers.{i}.{role}": site
            for i, layer in enumerate(self.layers)
            for role, site in layer.sites.items()
        }
        return {"embed": self.embed, **layers, "final_norm": self.final_norm, "head": self.head}

    def weights(self) -> dict[str, Weight]:
        """Its weights by canonical name; a bias is "layers.0.q_bias"."""
        weights = {}
        for name, site in self.roles().items():
            for weight, end in ((site.weight, ""), (site.bias, "_bias")):
                if weight is not None:
                    weights[name + end] = weight
        return weights


def match_decoder(found: Sites, where: str) -> Decoder:
    """Recognises the layers.

    Args:
        found: What the graph holds.
        where: The file's name, for messages.

    Returns:
        The decoder; every site has its role in it.

    Raises:
        FormatError: The sites are not those of a decoder of a supported kind.
    """
    return _Match(found, where).decoder()


class _Match:
    def __init__(self, found: Sites, where: str) -> None:
        self._found = found
        self._where = where
        self._users: dict[Site, list[Site]] = defaultdict(list)
        for site in found.sites:
            for source in site.inputs:
                self._users[source].append(site)
        self._attention_of: dict[frozenset[Site], Attention] = {
            one.value: one for one in found.attentions
        }

    def decoder(self) -> Decoder:
        """The whole of it."""
        embed = stream = self._found.sites[0]
        layers: list[DecoderLayer] = []
        while any(site.kind == "sum" for site in self._users[stream]):
            if len(layers) >= MAX_LAYERS:
                raise self._wrong(f"has more than {MAX_LAYERS} layers")
            layer, stream = self._layer(stream, f"layer {len(layers)}")
            layers.append(layer)
        final_norm = self._one("norm", self._users[stream], "the last norm")
        head = self._one("linear", self._users[final_norm], "the head")
        decoder = Decoder(embed=embed, layers=tuple(layers), final_norm=final_norm, head=head)
        self._check(decoder)
        return decoder

    def _layer(self, stream: Site, name: str) -> tuple[DecoderLayer, Site]:
        norm = self._one("norm", self._users[stream], f"the norm before the attention of {name}")
        sites = {"attn_norm": norm}
        attention = self._heads(sites, self._users[norm], name)
        sources = attention.query | attention.key | attention.value
        sites["o"] = self._one(
            "linear", self._from(sources), f"the layer after the attention of {name}"
        )
        stream = self._join(sites, stream, "o", "post_attn_norm", name)
        norm = self._one("norm", self._users[stream], f"the norm before the MLP of {name}")
        sites["ffn_norm"] = norm
        pair = [site for site in self._users[norm] if site.kind == "linear"]
        gates = [site for site in pair if site.activation is not None]
        if len(pair) != 2 or len(gates) != 1:
            raise self._wrong(
                f"has {len(pair)} layers, {len(gates)} with an activation, after {norm.node} of "
                f"{name}; a gate and one without were expected"
            )
        sites["gate"] = gates[0]
        sites["up"] = next(site for site in pair if site is not gates[0])
        sites["down"] = self._one("linear", self._from(frozenset(pair)), f"the last one of {name}")
        stream = self._join(sites, stream, "down", "post_ffn_norm", name)
        return DecoderLayer(sites=sites, attention=attention), stream

    def _heads(self, sites: dict[str, Site], layers: list[Site], name: str) -> Attention:
        """Finds q, k and v among the three layers after a norm."""
        attention = next(
            (
                self._attention_of[frozenset((layer,))]
                for layer in layers
                if frozenset((layer,)) in self._attention_of
            ),
            None,
        )
        if attention is None or len(layers) != 3:
            raise self._wrong(
                f"has {len(layers)} layers {'and no attention ' if attention is None else ''}after "
                f"the first norm of {name}; queries, keys and values were expected"
            )
        for role, ends in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            site = self._only(ends, f"{role} of {name}")
            if site.kind == "norm" and role != "v":
                sites[f"{role}_norm"] = site
                site = self._only(site.inputs, f"{role} of {name}")
            if site not in layers or site.kind != "linear" or site in sites.values():
                raise self._wrong(f"has {role} of {name} at {site.node}, which is another layer")
            sites[role] = site
        return attention

    def _join(self, sites: dict[str, Site], stream: Site, role: str, norm: str, name: str) -> Site:
        """The sum of the stream and what `role`, or a norm behind it, makes."""
        tail = sites[role]
        norms = [site for site in self._users[tail] if site.kind == "norm"]
        if norms:
            tail = sites[norm] = self._one("norm", norms, f"the norm after {role} of {name}")
        return self._one(
            "sum", self._from(frozenset((stream, tail))), f"a sum after {role} of {name}"
        )

    def _from(self, sources: frozenset[Site]) -> list[Site]:
        """The sites that take all of `sources` and nothing else."""
        return [site for site in self._users[next(iter(sources))] if site.inputs == sources]

    def _one(self, kind: SiteKind, sites: Iterable[Site], what: str) -> Site:
        found = [site for site in sites if site.kind == kind]
        if len(found) != 1:
            raise self._wrong(f"has {len(found)} candidates for {what}; one was expected")
        return found[0]

    def _only(self, sites: frozenset[Site], what: str) -> Site:
        if len(sites) != 1:
            raise self._wrong(f"has {what} made of {len(sites)} layers")
        return next(iter(sites))

    def _check(self, decoder: Decoder) -> None:
        """Everything found is used, and the head makes an output."""
        used = {id(site) for site in decoder.roles().values()}
        left = [s.node for s in self._found.sites if s.kind != "sum" and id(s) not in used]
        left += [
            a.node
            for a in self._found.attentions
            if all(a is not x.attention for x in decoder.layers)
        ]
        if left:
            raise self._wrong(
                f"has {len(left)} operations with weights that no decoder has, such as {left[0]}"
            )
        for role, site in decoder.roles().items():
            if site.activation is not None and not role.endswith(".gate"):
                raise self._wrong(f"has an activation after {role}")
        if not any(value.sites == {decoder.head} for value in self._found.outputs):
            raise self._wrong("does not return the logits")

    def _wrong(self, what: str) -> FormatError:
        return FormatError(f"{self._where} {what}: not a decoder that edgellm knows")

"""The Jinja environment of chat templates; the only module that imports jinja2.

Settings and helpers are those of `transformers`. A template comes out of a model file, so it runs
in Jinja's immutable sandbox and on a budget: loops, macros and what makes text longer are paid for,
so that a hostile template ends in an error and not in an endless loop or a full memory.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_TEXT", "RaisedByTemplateError", "create_environment", "start_budget"]

MAX_TEXT = 16 << 20  # characters of one text, and of the output
BUDGET = 256 << 20  # characters made in one rendering
ITERATION_COST = 1024  # characters: 262,144 iterations use up the budget, in a few seconds

_LONG_NUMBER = re.compile(r"\d{6}")
_PADDERS = frozenset({"center", "ljust", "rjust", "zfill"})
_left: ContextVar[int] = ContextVar("left", default=BUDGET)


class RaisedByTemplateError(TemplateError):
    """The template called `raise_exception`."""


def start_budget() -> None:
    """Give the rendering that follows in this thread a fresh budget."""
    _left.set(BUDGET)


def _spend(size: int) -> None:
    left = _left.get() - max(size, 0)
    _left.set(left)
    if size > MAX_TEXT or left < 0:
        raise SecurityError(f"it loops too often or makes more than {MAX_TEXT >> 20} MiB of text")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 1


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _spend_on_product(bits: int) -> None:
    _spend(bits * bits >> 12)  # quadratic, as the time is; up to 262,144 bits


def _spend_on_format(text: str, values: Any) -> None:
    values = values if isinstance(values, (tuple, list)) else (values,)
    if _LONG_NUMBER.search(text) or any(isinstance(v, int) and v > MAX_TEXT for v in values):
        _spend(MAX_TEXT + 1)


def _spend_on_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Pay for a string method that can return much more than it was given."""
    numbers = [a for a in args if isinstance(a, int)]
    if name in _PADDERS and numbers:
        _spend(max(numbers))
    elif name == "expandtabs":
        _spend(len(text) * max([8, *numbers]))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str):
        _spend(len(text) + text.count(args[0]) * _size(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _spend(len(text) * len(args[0]) + sum(map(_size, args[0])))


class _Meter(NodeTransformer):
    """Makes loops, macros and `~` pay."""

    def _metered(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = _metered  # noqa: N815 (jinja2's names)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("concat_texts")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    @staticmethod
    def tick() -> None:
        _spend(ITERATION_COST)

    @staticmethod
    def concat_texts(*values: Any) -> str:
        texts = [str(value) for value in values]
        _spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _spend_on_product(_bits(left) * right if isinstance(right, int) else 64)
        elif operator == "%" and isinstance(left, str):
            _spend_on_format(left, right)
        elif operator == "*":
            sequence, number = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(sequence, (str, list, tuple)):
                _spend(_size(sequence) * number)
            else:
                _spend_on_product(max(_bits(left), _bits(right)))
        else:
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _spend_on_method(owner, obj.__name__, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        _spend(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        @functools.wraps(wrapper)
        def checked(*args: Any, **kwargs: Any) -> str:
            _spend_on_format(value.__self__, [*args, *kwargs.values()])
            return wrapper(*args, **kwargs)

        return checked


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        # a filter may get the environment or context in front of what it filters
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        first, rest = (values[0] if values else ""), (*values[1:], *kwargs.values())
        if name == "format":
            _spend_on_format(str(first), rest)
        elif name == "join":
            first = list(first)
            args = (*args[: len(args) - len(values)], first, *values[1:])
            _spend_on_method(str(rest[0]) if rest else "", "join", (first,))
        elif name == "indent" or name == "tojson":
            _spend(_size(first) * max([1, *(n for n in rest if isinstance(n, int))]))
        elif isinstance(first, str):
            _spend_on_method(first, name, rest)
        result = function(*args, **kwargs)
        _spend(_size(result))
        return result

    return metered


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 wants a set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Refuses underscored names, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have an attribute {name!r}")


class _Dict:
    """`dict` without a way to its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: Any) -> None:
    raise RaisedByTemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def create_environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for.

    Args:
        clock: What `strftime_now` asks for the time.

    Returns:
        A new environment.

    Source: transformers, `utils/chat_template_utils.py`, for settings and names.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    filters: Mapping[str, Callable[..., Any]] = {**environment.filters, "tojson": _tojson}
    environment.filters = {name: _metered_filter(name, f) for name, f in filters.items()}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: clock().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment

"""Constraints that a configuration class checks in its own validators, and values that meet them.

transformers' configuration classes raise from `validate_...` methods: `if self.a + self.part.b != self.c: raise ...`.
The comparisons are read from the source, so a tiny configuration meets them without a rule per model.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import CodeType, SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from nrl_models.common.cached import cached

Path = tuple[str, ...]
"""Key of a configuration, or of one of its parts: `("vision_config", "codebook_size")`."""


class ConstraintKind(Enum):
    """Relation between two sides that a validator requires."""

    EQUAL = "=="
    AT_MOST = "<="
    AT_LEAST = ">="
    MULTIPLE = "is a multiple of"


REFUSED = {
    ast.NotEq: ConstraintKind.EQUAL,
    ast.IsNot: ConstraintKind.EQUAL,
    ast.Gt: ConstraintKind.AT_MOST,
    ast.Lt: ConstraintKind.AT_LEAST,
}
"""Relation that holds if a comparison that raises is false. `>=` and `<=` have no closest value that satisfies them."""


@dataclass(frozen=True)
class Constraint:
    """A relation that holds in all configurations of a class.

    Args:
        kind: The relation.
        left: Left side, an expression over `self`.
        right: Right side.
        paths: Keys in the expressions, starting with those that are a complete side.
        summed: Keys whose sum is one side if the other side is a single key; otherwise empty.
        total: That single key; empty if there is none.
    """

    kind: ConstraintKind
    left: CodeType
    right: CodeType
    paths: tuple[Path, ...]
    summed: tuple[str, ...] = ()
    total: str = ""

    def sides(self, config: Any) -> tuple[Any, Any]:
        """Return the values of both sides."""
        names = {"self": config}  # the expressions are from the source of the configuration class
        return eval(self.left, names), eval(self.right, names)

    def holds(self, config: Any) -> bool:
        """Return True if `config` meets the constraint."""
        left, right = self.sides(config)
        relations: dict[ConstraintKind, Callable[[], bool]] = {
            ConstraintKind.EQUAL: lambda: bool(left == right),
            ConstraintKind.AT_MOST: lambda: bool(left <= right),
            ConstraintKind.AT_LEAST: lambda: bool(left >= right),
            ConstraintKind.MULTIPLE: lambda: left % right == 0,
        }
        return relations[self.kind]()


@cached
def constraints_of(config_class: type[PreTrainedConfig]) -> tuple[Constraint, ...]:
    """Return the constraints from the validators of a configuration class and its bases, bounds before equations."""
    constraints: list[Constraint] = []
    for owner in config_class.__mro__:
        if not issubclass(owner, PreTrainedConfig) or owner is PreTrainedConfig:
            continue
        for name, validator in vars(owner).items():
            if name.startswith("validate_") and inspect.isfunction(validator):
                constraints += _read(validator)
    return tuple(sorted(constraints, key=lambda constraint: constraint.kind is ConstraintKind.EQUAL))


def sections_of(config_class: type[PreTrainedConfig], total: str) -> tuple[str, ...]:
    """Return keys that count consecutive layers, if a class requires that they add up to `total` layers."""
    return next((constraint.summed for constraint in constraints_of(config_class) if constraint.total == total), ())


def satisfy(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return changes to `values` that satisfy the constraints of `config_class`.

    Values of parts are changed in place. Constraints that no change of a single number satisfies are ignored.

    Args:
        config_class: The configuration class.
        values: All values of a configuration, with parts as configurations.
        fixed: Keys that must not change; for parts, mappings of such keys.
    """
    config, changed = SimpleNamespace(**values), set[Path]()
    for constraint in constraints_of(config_class) * 2:  # a change may affect another constraint
        try:
            if constraint.holds(config):
                continue
        except Exception:  # keys that are unset, or properties of a configuration that is not built yet
            continue
        free = [path for path in constraint.paths if not _is_fixed(path, fixed)]
        for path in sorted(free, key=lambda path: (path in changed, len(path))):
            if _solve(constraint, config, path):
                changed.add(path)
                break
    return {path[0]: getattr(config, path[0]) for path in changed if len(path) == 1}


def _solve(constraint: Constraint, config: Any, path: Path) -> bool:
    """Change one key so that `constraint` holds. If no integer does, change nothing, and return False."""
    owner = config
    for part in path[:-1]:
        owner = getattr(owner, part)
    old = getattr(owner, path[-1])
    try:
        setattr(owner, path[-1], old)
    except AttributeError:  # a property
        return False
    for value in _candidates(constraint, config, owner, path[-1]):
        try:
            setattr(owner, path[-1], value)
            if constraint.holds(config):
                return True
        except Exception:  # the value has the wrong type for the key
            continue
    setattr(owner, path[-1], old)
    return False


def _candidates(constraint: Constraint, config: Any, owner: Any, key: str) -> Iterator[Any]:
    """Yield values of a key that may satisfy `constraint`: the other side's value, or the solution if it is linear."""
    old, (left, right) = getattr(owner, key), constraint.sides(config)
    if constraint.kind is ConstraintKind.MULTIPLE:
        if old == right:
            yield math.gcd(left, right)
        elif old == left:
            yield right * max(1, left // right)
        return
    yield from (side for side in (right, left) if type(side) is bool or side is None)
    if type(old) is not int:
        return
    setattr(owner, key, old + 1)
    moved_left, moved_right = constraint.sides(config)
    slope, gap = (moved_left - moved_right) - (left - right), left - right
    if slope and (value := old - gap // slope) >= 0:
        yield value


def _is_fixed(path: Path, fixed: Any) -> bool:
    for key in path:
        if not isinstance(fixed, Mapping) or key not in fixed:
            return False
        fixed = fixed[key]
    return True


# Reading the source


def _read(validator: Callable[..., Any]) -> Iterator[Constraint]:
    """Yield the constraints of one validator."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(validator)))
    except (OSError, SyntaxError):  # no source, or other code than a function
        return
    named: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                named[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                named[name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(isinstance(statement, ast.Raise) for statement in node.body):
            match node.test:
                case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in REFUSED:
                    if made := _constraint(REFUSED[type(operator)], _inlined(left, named), _inlined(right, named)):
                        yield made


def _constraint(kind: ConstraintKind, left: ast.expr, right: ast.expr) -> Constraint | None:
    """Create a constraint from its two sides. Return None if they contain no keys."""
    match kind, left, right:
        case ConstraintKind.EQUAL, ast.BinOp(left=dividend, op=ast.Mod(), right=divisor), ast.Constant(value=0):
            kind, left, right = ConstraintKind.MULTIPLE, dividend, divisor
    # A divisor is changed before the number it divides, which may be the index of a layer. The larger side of a bound
    # is reduced, because tiny configurations do not have a larger vocabulary.
    sides = (right, left) if kind in (ConstraintKind.MULTIPLE, ConstraintKind.AT_LEAST) else (left, right)
    side_paths = [
        path for side in sides if (path := _path(side)) and kind in (ConstraintKind.EQUAL, ConstraintKind.MULTIPLE)
    ]
    inside = [path for side in sides for node in ast.walk(side) if (path := _path(node))]
    # `self.a` inside `self.a.b` is a part, not a key.
    paths = [
        path
        for path in dict.fromkeys([*side_paths, *inside])
        if not any(path == other[: len(path)] != other for other in inside)
    ]
    if not paths:
        return None
    summed, total = _sum(left), _path(right)
    if not summed or total is None:
        summed, total = _sum(right), _path(left)
    is_sum = kind is ConstraintKind.EQUAL and len(summed) > 1 and total is not None and len(total) == 1
    return Constraint(
        kind, _code(left), _code(right), tuple(paths), summed if is_sum else (), total[0] if is_sum and total else ""
    )


def _code(side: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(side)), "<validator>", "eval")


def _path(node: ast.AST) -> Path | None:
    """Return the key of an expression `self.a.b`, or None for other expressions."""
    keys: list[str] = []
    while isinstance(node, ast.Attribute):
        keys.append(node.attr)
        node = node.value
    return tuple(reversed(keys)) if keys and isinstance(node, ast.Name) and node.id == "self" else None


def _sum(node: ast.expr) -> tuple[str, ...]:
    """Return the keys that are added, in order. Empty if there are other operations."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _sum(left), _sum(right)
            return (*first, *second) if first and second else ()
    path = _path(node)
    return path if path is not None and len(path) == 1 else ()


def _inlined(node: ast.expr, named: Mapping[str, ast.expr]) -> ast.expr:
    """Return an expression with local variables replaced by the expressions assigned to them."""

    class Inline(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            if name.id not in named:
                return name
            others = {other: value for other, value in named.items() if other != name.id}  # `size = size or 1` ends
            return _inlined(named[name.id], others)

    return Inline().visit(ast.parse(ast.unparse(node), mode="eval").body)  # a copy: the tree is read again

"""Small changes to a module's source, each of which some test should notice. Used by `run`.

Left alone: assertions (zip's too), messages of errors, annotations, decorators, docstrings.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_LEFT_ALONE = {"strict", "maxlen"}  # of zip: an assertion; of a log: free
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """`name` has no line number, so that it outlives changes elsewhere in the file."""

    name: str
    line: int
    source: str


def mutants_of(source: str, module: str) -> Iterator[Mutant]:
    """Every mutant once; equal names of one module are numbered."""
    seen: dict[str, int] = {}
    for path, function in _places(ast.parse(source)):
        for index in range(len(_changes(_at(ast.parse(source), path)))):
            tree = ast.parse(source)
            node = _at(tree, path)
            if isinstance(node, ast.Assign) and function.endswith("__init__"):
                continue  # the first use of the attribute would tell
            before, line = _words(node), getattr(node, "lineno", 0)
            _put(tree, path, _changes(node)[index])
            after = _words(_at(tree, path))
            name = f"{module}.{function}: {before} -> {after}"
            seen[name] = seen.get(name, 0) + 1
            number = f" (#{seen[name]})" if seen[name] > 1 else ""
            yield Mutant(name + number, line, ast.unparse(ast.fix_missing_locations(tree)))


Path = tuple[tuple[str, int | None], ...]


def _places(tree: ast.Module) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []

    def walk(node: ast.AST, path: Path, function: str) -> None:
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.arguments):
            return
        if isinstance(node, ast.keyword) and node.arg in _LEFT_ALONE:
            return
        if isinstance(node, ast.ClassDef):
            function = node.name
        elif isinstance(node, ast.FunctionDef):
            function = node.name if function == "module" else f"{function}.{node.name}"
        found.append((path, function))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
                continue
            if isinstance(value, ast.AST):
                walk(value, (*path, (name, None)), function)
            elif isinstance(value, list):
                for index, one in enumerate(value):
                    if isinstance(one, ast.AST):
                        walk(one, (*path, (name, index)), function)

    walk(tree, (), "module")
    return found


def _at(tree: ast.AST, path: Path) -> ast.AST:
    node = tree
    for name, index in path:
        value = getattr(node, name)
        node = value if index is None else value[index]
    return node


def _put(tree: ast.AST, path: Path, node: ast.AST) -> None:
    owner = _at(tree, path[:-1])
    name, index = path[-1]
    if index is None:
        setattr(owner, name, node)
    else:
        getattr(owner, name)[index] = node


def _words(node: ast.AST) -> str:
    text = ast.unparse(node)
    first, _, more = text.partition("\n")
    return first + (" ..." if more else "")


def _changes(node: ast.AST) -> list[ast.AST]:
    """What could stand in this node's place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARE:
            return [_with(node, ops=[_COMPARE[type(op)]()])]
        case ast.Compare(ops=[first, *rest]):
            return [_with(node, ops=[_COMPARE[type(first)](), *rest])]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            changed: list[ast.AST] = [_with(node, op=_ARITHMETIC[type(op)]())]
            return [*changed, ast.Pass()] if isinstance(node, ast.AugAssign) else changed
        case ast.BoolOp(op=ast.And()):
            return [_with(node, op=ast.Or())]
        case ast.BoolOp(op=ast.Or()):
            return [_with(node, op=ast.And())]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return [operand]
        case ast.Constant(value=bool(value)):
            return [_with(node, value=not value)]
        case ast.Constant(value=int(number)):
            return [_with(node, value=number + 1)]
        case ast.Constant(value=float(real)):
            return [_with(node, value=real * 1.5 + 0.1)]
        case ast.Call(func=ast.Name(id=name) as func) if name in _TWINS:
            return [_with(node, func=_with(func, id=_TWINS[name]))]
        case ast.If() | ast.While() | ast.IfExp() if not _negates_itself(node.test):
            return [_with(node, test=ast.UnaryOp(ast.Not(), node.test))]
        case ast.Slice(lower=lower, upper=upper):
            drops = [("lower", lower), ("upper", upper)]
            return [_with(node, **{end: None}) for end, at in drops if at is not None]
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Break() | ast.Continue():
            return [ast.Pass()]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return [ast.Pass()]
        case ast.Return(value=ast.expr()) if not _is_constant(node.value):
            return [ast.Return(ast.Constant(None))]
    return []


def _negates_itself(test: ast.expr) -> bool:
    """Its own mutant says the same as a negation would."""
    return isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and len(test.ops) == 1)


def _is_constant(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    twin = copy.copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin

"""Graph texts from one-line expressions, for the examples of rules."""

from __future__ import annotations

from opgraph.ir.expression import Call, Expr, Num, Param, Var, parse_expression


def graph_of(expression: str | Expr, *, dtype: str = "f32", shape: str = "[4,8]", **types: str) -> str:
    """The text of a graph that computes `expression`, with an output called y.

    Args:
        expression: calls of ops over names (inputs of the graph) and numbers.
        dtype, shape: of inputs without an entry in `types`.
        types: the full type of an input, by name: `a="f32[8]"`.

    Equal calls are one op, as equal names are one value.
    """
    tree = parse_expression(expression) if isinstance(expression, str) else expression
    writer = _Writer()
    result = writer.write(tree)
    inputs = ", ".join(f"{name}: {types.get(name, dtype + shape)}" for name in sorted(writer.inputs))
    lines = [line.replace(f"{result} =", "y =", 1) for line in writer.lines]
    return "\n".join([f"graph({inputs}) -> (y)", *lines])


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inputs: set[str] = set()
        self.made: dict[Expr, str] = {}

    def write(self, tree: Expr) -> str:
        if isinstance(tree, Num):
            return repr(tree.value)
        if isinstance(tree, Param):
            raise ValueError(f"an example has no parameters, but ${tree.name}")
        if isinstance(tree, Var):
            self.inputs.add(tree.name)
            return tree.name
        if tree not in self.made:
            self.made[tree] = self.call(tree)
        return self.made[tree]

    def call(self, tree: Call) -> str:
        args = [self.write(arg) for arg in tree.args]
        for name, value in tree.attrs:
            literal = f'"{value}"' if isinstance(value, str) else str(value)
            args.append(f"{name}={literal}")
        result = f"%{len(self.lines)}"
        self.lines.append(f"  {result} = {tree.kind}({', '.join(args)})")
        return result

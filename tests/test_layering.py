"""The project's rules that no linter checks: import order, allowed imports, and the maximum size of a module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "opgraph"
ORDER = (
    "errors",
    "ir",
    "ops",
    "partition",
    "transforms",
    "loops",
    "schedule",
    "codegen",
    "runtime",
    "onnx",
    "torch",
    "onednn",
    "bench",
    "cli",
    "__main__",
)
#: Methods of early classes that may import a later stage; all other code keeps the order.
FRONT_DOORS = {
    ("ir/graph.py", "get_partitions"),
    ("ir/graph.py", "explain"),
    ("ir/registry.py", "_fill"),
    ("partition/partition.py", "compile"),
    ("runtime/providers/onnx_native.py", "_emitter"),
}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


def imports(path: Path) -> list[tuple[str, str]]:
    """(enclosing function, imported module) for every import of opgraph in a file."""
    found = []
    stack: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text()), "")]
    while stack:
        node, function = stack.pop()
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue  # never imported at run time
        if isinstance(node, ast.Import):
            found += [(function, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(function, f"{node.module}.{a.name}") for a in node.names]
        stack += [(child, function) for child in ast.iter_child_nodes(node)]
    return [(f, m) for f, m in found if m.startswith("opgraph.")]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_its_own_or_an_earlier_stage(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = ORDER.index(relative.parts[0].removesuffix(".py"))
    for function, module in imports(path):
        stage = module.split(".")[1]
        if (str(relative), function) in FRONT_DOORS or stage not in ORDER:
            continue
        assert ORDER.index(stage) <= own, f"{relative} imports {module}"


def test_import_needs_only_numpy_and_ml_dtypes() -> None:
    heavy = ("torch", "onnx", "onnx_ir", "onnxruntime", "cupy", "scipy", "rich", "sympy")
    code = f"import sys, opgraph; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: The files with private parts of torch: for calls, and for its compilers.
TORCH_INTERNALS = {"runtime/providers/torch_internals.py", "torch/graph/torch_internals.py"}


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) for everything that a file imports from torch or reads from it."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in bound:
            yield node.lineno, ".".join([bound[value.id], *reversed(parts)])


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_names_are_used_only_in_torch_internals(path: Path) -> None:
    """Names of ATen ops may begin with an underscore, and jiterator has no other entry."""
    if str(path.relative_to(PACKAGE)) in TORCH_INTERNALS:
        return
    for line, name in torch_names(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "torch" and parts[1:3] != ["ops", "aten"] and parts[-2:] != ["jiterator", "_create_jit_fn"]:
            private = [p for p in parts if p.startswith("_") and not p.startswith("__")]
            assert not private, f"line {line}: {name}"

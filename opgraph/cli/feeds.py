"""Input arrays of a model: drawn at random for declared shapes, or read from a file."""

from __future__ import annotations

import argparse
import ast
import math
import operator
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opgraph.cli.main import UsageError, refuse_passed_over
from opgraph.errors import InvalidArguments, ModelError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims

#: Default sizes of symbols, in order of appearance: small, and different, so that a mix-up shows.
SMALL_SIZES = (2, 16, 6, 10, 12, 7, 9, 5)
#: The most elements, of 8 bytes each; NumPy cannot count more bytes.
_MOST_ELEMENTS = np.iinfo(np.intp).max // 8
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model: its name, opgraph's name for its dtype, its dimensions."""

    name: str
    dtype: str
    dims: Dims


def feeding_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the inputs of a model."""
    parser.add_argument(
        "--inputs", metavar="F.npz", help="arrays to run with, by input name (default: seeded random ones)"
    )
    parser.add_argument(
        "--dim",
        metavar="NAME=SIZE",
        action="append",
        default=[],
        help="the size of a symbolic dimension; repeat as needed",
    )


def feeds_for(args: argparse.Namespace, ports: Sequence[Port]) -> dict[str, np.ndarray]:
    """Returns arrays for all ports, as specified on the command line.

    Raises:
        OpGraphError: as `read_feeds`, `sizes_for` and `random_feeds`.
    """
    given = parse_sizes(args.dim)
    if args.inputs:
        refuse_passed_over({"--dim": args.dim}, "the arrays of --inputs have their sizes")
    return read_feeds(args.inputs, ports) if args.inputs else random_feeds(ports, sizes_for(ports, given))


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """Parses `--dim batch=4` arguments.

    Raises:
        UsageError: an argument does not have that form, or a name is given twice.
    """
    sizes = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not (size.isascii() and size.isdigit()):
            raise UsageError(f"--dim {text!r} names no size", where="--dim", fix="write --dim batch=4")
        if name in sizes:
            raise UsageError(f"--dim {name} is given twice", where=f"--dim {text}", fix="give each name one size")
        sizes[name] = int(size)
    return sizes


def sizes_for(ports: Iterable[Port], given: Mapping[str, int]) -> dict[str, int]:
    """A size for each plain symbol of the inputs: the given one, else the next of SMALL_SIZES.

    Raises:
        UsageError: a size is given for a symbol that no input has.
    """
    symbols = {d: None for p in ports for d in p.dims or () if isinstance(d, str) and d.isidentifier()}
    unknown = [name for name in given if name not in symbols]
    if unknown:
        raise UsageError(
            f"no input has a dimension called {unknown[0]!r}",
            where="--dim",
            fix=f"the symbols are {', '.join(symbols)}" if symbols else "the inputs have no symbolic dimension",
        )
    free = [name for name in symbols if name not in given]
    return {**given, **{name: SMALL_SIZES[i % len(SMALL_SIZES)] for i, name in enumerate(free)}}


def random_feeds(ports: Iterable[Port], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Seeded inputs: floats from N(0, 1), integers 0 or 1 (valid as index, mask and token), booleans; quantized values
    like the floats or integers that they are.

    Args:
        sizes: of symbols, from `sizes_for`.

    Raises:
        InvalidArguments: an input has an unknown number of dimensions, a dtype that cannot be drawn, or more elements
            than NumPy counts.
    """
    generator = np.random.default_rng(0)
    feeds = {}
    for port in ports:
        record = dtypes.BY_NAME.get(port.dtype)
        if port.dims is None or record is None:
            reason = "an unknown number of dimensions" if port.dims is None else f"dtype {port.dtype}"
            raise InvalidArguments(
                f"no array can be drawn for {reason}", where=f'input "{port.name}"', fix="give it by --inputs FILE.npz"
            )
        shape = tuple(_size(d, sizes, port.name) for d in port.dims)
        if math.prod(shape) > _MOST_ELEMENTS:
            raise InvalidArguments(
                f"an array of {'x'.join(map(str, shape))} is larger than any memory",
                where=f'input "{port.name}"',
                fix="give smaller sizes: --dim NAME=SIZE or --inputs FILE.npz",
            )
        is_float = record.is_float or record.name.startswith("f8")
        drawn = generator.standard_normal(shape) if is_float else generator.integers(0, 2, shape)
        feeds[port.name] = np.asarray(drawn).astype(record.numpy)
    return feeds


def _size(dim: int | str | None, sizes: Mapping[str, int], name: str) -> int:
    if isinstance(dim, int):
        return dim
    if dim is None:
        return SMALL_SIZES[0]
    if dim in sizes:  # it may be a keyword of Python
        return sizes[dim]
    try:
        value = _computed(ast.parse(dim, mode="eval").body, sizes)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        value = -1
    if value < 0:
        raise InvalidArguments(
            f"dimension {dim!r} has no size", where=f'input "{name}"', fix="give the arrays by --inputs FILE.npz"
        )
    return value


def _computed(node: ast.AST, sizes: Mapping[str, int]) -> int:
    """Computes a dimension like "seq + 1"; a model's text is never evaluated as Python."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in sizes:
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_computed(node.left, sizes), _computed(node.right, sizes)))
    raise ValueError("not a sum or product of sizes")


def read_feeds(path: str, ports: Iterable[Port]) -> dict[str, np.ndarray]:
    """Reads arrays from an .npz file, by input name; names that no input has are ignored.

    Raises:
        ModelError: no .npz file, or one that holds Python objects.
        InvalidArguments: an input is missing in it.
    """
    if not Path(path).is_file():
        raise ModelError("the file is not there", where=path, fix="write one with numpy.savez(path, **{name: array})")
    if not zipfile.is_zipfile(path):
        raise ModelError("no .npz file: it is no archive of arrays", where=path, fix="write it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy, zipfile and zlib each raise their own errors
        raise ModelError(f"no .npz file: {error}", where=path, fix="write it with numpy.savez") from None
    feeds = {}
    for port in ports:
        if port.name not in stored:
            raise InvalidArguments(
                f"the file has no array called {port.name!r}", where=path, fix=f"it has {', '.join(stored) or 'none'}"
            )
        feeds[port.name] = _with_own_dtype(stored[port.name], port)
    return feeds


def _with_own_dtype(array: np.ndarray, port: Port) -> np.ndarray:
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # onnxruntime ignores the byte order
    # NumPy stores the types of ml_dtypes as opaque bytes ("|V2"), and many users store their bits as unsigned integers.
    target = dtypes.BY_NAME.get(port.dtype)
    if target is None or array.dtype == target.numpy or array.dtype.itemsize != target.itemsize:
        return array
    return array.view(target.numpy) if array.dtype.kind in "Vu" and target.numpy.kind == "V" else array

"""An ONNX file in onnxruntime: its ports, one run, and two files timed side by side."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opgraph.bench.timing import HostClock, in_turns
from opgraph.cli.feeds import Port
from opgraph.errors import DeviceError, InvalidArguments, Unimplemented
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.onnx.probe import DTYPE_OF_TYPE
from opgraph.runtime.providers.onnxruntime import array_of, onnxruntime_module, ort_value

#: Two runs of one model may differ by this ratio even if timed in turn.
TOLERATED = 1.02
#: The session option for the folder of the data files, if the model is passed as bytes.
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxFile:
    """A session on the CPU, with every optimization that onnxruntime has.

    Args:
        path: the file.
        content: the model as bytes, if it differs from the file; its data files are next to `path`.
        library: a library of custom ops to register.
        label: the file's name in messages, if the user did not choose its path.
        spins: True if its idle threads spin. They must not if it runs next to anything whose threads sleep.

    Raises:
        DeviceError: onnxruntime is not installed, or refuses the model or the library.
    """

    def __init__(
        self,
        path: str,
        content: bytes | None = None,
        library: str | None = None,
        *,
        label: str | None = None,
        spins: bool = False,
    ) -> None:
        self.label = path if label is None else label
        ort = onnxruntime_module()
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors arrive as exceptions
        if not spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if content is None and not _is_utf8(path):
            content = Path(path).read_bytes()  # onnxruntime accepts no such name
        if content is not None and _is_utf8(path):
            options.add_session_config_entry(_DATA_FOLDER, os.path.dirname(os.path.abspath(path)))
        if library is not None:
            try:
                options.register_custom_ops_library(os.path.abspath(library))
            except Exception as error:  # as below
                raise DeviceError(
                    f"onnxruntime cannot load the library: {_one_line(error)}",
                    where=library,
                    fix="give a library that `opgraph fuse --ort-library` wrote on a machine like this one",
                ) from error
        try:
            self._session = ort.InferenceSession(
                path if content is None else content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's error classes have no common base
            raise DeviceError(
                f"onnxruntime refuses the model: {_one_line(error).replace(path, self.label)}",
                where=self.label,
                fix="write it again, or for an onnxruntime that reads it",
            ) from error
        self.inputs = _ports(self._session.get_inputs(), "input", self.label)
        self.outputs = _ports(self._session.get_outputs(), "output", self.label)
        self._names = [p.name for p in self.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every output, by name.

        Raises:
            DeviceError: a node failed.
        """
        try:
            results = self.caller(feeds)()
            return {p.name: array_of(v, _tensor(p)) for p, v in zip(self.outputs, results, strict=True)}
        except Exception as error:  # as above
            raise DeviceError(
                f"onnxruntime failed: {_one_line(error)}",
                where=self.label,
                fix="give inputs that fit: --dim NAME=SIZE or --inputs FILE.npz",
            ) from error

    def caller(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], Any]:
        """A function that runs the model on these arrays, with nothing left to prepare."""
        ort = onnxruntime_module()
        arrays = {p.name: np.require(feeds[p.name], requirements="C") for p in self.inputs}
        values = {p.name: ort_value(ort, arrays[p.name], _tensor(p)) for p in self.inputs}

        def call(keep: Any = arrays) -> Any:  # the OrtValues do not own their memory
            return self._session.run_with_ort_values(self._names, values)

        return call


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ports(arguments: Sequence[Any], what: str, label: str) -> tuple[Port, ...]:
    ports = []
    for argument in arguments:
        if argument.type not in DTYPE_OF_TYPE:
            raise Unimplemented(
                f"values of type {argument.type} cannot be compared",
                where=f'{what} "{argument.name}" of {label}',
                fix="compare models of tensors of numbers; `opgraph fuse --unchecked` writes any model, unrun",
            )
        dims = tuple(d if isinstance(d, (int, str)) else None for d in argument.shape)
        ports.append(Port(argument.name, DTYPE_OF_TYPE[argument.type], dims))
    return tuple(ports)


def _tensor(port: Port) -> LogicalTensor:
    return LogicalTensor(0, port.dtype, None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def check_same_ports(a: OnnxFile, b: OnnxFile) -> None:
    """Raises InvalidArguments unless two files have inputs and outputs of the same names and dtypes."""
    for word, left, right in (("inputs", a.inputs, b.inputs), ("outputs", a.outputs, b.outputs)):
        ports = [[f"{p.name} {p.dtype}" for p in side] for side in (left, right)]
        if ports[0] != ports[1]:
            raise InvalidArguments(
                f"the {word} are {', '.join(ports[0])} here and {', '.join(ports[1])} there",
                where=f"{a.label} and {b.label}",
                fix="compare two files of one model",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Calls timed in turn.

    Attributes:
        fastest: seconds of each call's fastest run, which other work on the machine disturbs least.
        ratios: of each to the first: the median over rounds; every call runs once per round.
        rounds: the number of rounds.
    """

    fastest: tuple[float, ...]
    ratios: tuple[float, ...]
    rounds: int

    def is_slower(self, which: int) -> bool:
        """True if a call takes longer than the first, both in the median of rounds and in the fastest run.

        Other work on the machine changes one of the two, but rarely both.
        """
        return self.ratios[which] > TOLERATED and self.fastest[which] > TOLERATED * self.fastest[0]


def timed(calls: Sequence[Callable[[], Any]], budget: float = 2.0, most: int = 200) -> Timing:
    """Runs calls in turn, so that other work on the machine slows down all of them.

    Args:
        calls: the others are compared with the first.
        budget, most: seconds and rounds, as for `opgraph.bench.timing.in_turns`.
    """
    times = in_turns({str(i): call for i, call in enumerate(calls)}, HostClock(), budget, most)
    first = times["0"]
    pairs = [
        [(a, b) for a, b in zip(first, row, strict=True) if a is not None and b is not None] for row in times.values()
    ]
    return Timing(
        fastest=tuple(min(b for _, b in row) for row in pairs),
        ratios=tuple(statistics.median(b / a for a, b in row) for row in pairs),
        rounds=len(first),
    )

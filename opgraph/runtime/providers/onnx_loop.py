"""onnx's evaluator with a corrected Loop op."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_loop import Loop as _Loop


class Loop(_Loop):
    """Loop with a new axis for scan outputs: onnx 1.23 joins matrices along their rows instead, and numbers too."""

    op_domain = ""

    def _run(
        self,
        M: Any,  # noqa: N803  # the evaluator's own name
        cond: Any,
        *args: Any,
        context: Any = None,
        body: Any = None,
        attributes: Any = None,
        bindings: Any = None,
    ) -> tuple[Any, ...]:
        node: Any = self  # its graph attribute becomes a Python attribute at construction
        names = node.body.input_names
        inputs = {**(context or {}), **dict(zip(names[2:], args, strict=False))}
        scanned: list[list[Any]] = [[] for _ in range(self.K)]
        state = [inputs.get(name) for name in names[2:]]
        going, step = cond is None or bool(np.asarray(cond).all()), 0
        while going and (M is None or step < int(np.asarray(M).item())):
            inputs.update(zip(names[2:], state, strict=True))
            inputs[names[0]] = np.asarray(step, np.int64)
            inputs[names[1]] = np.asarray(True)
            made = node._run_body(inputs, attributes=attributes, bindings=bindings)
            going = bool(np.asarray(made[0]).all())
            state = list(made[1 : 1 + self.N])
            for values, value in zip(scanned, made[1 + self.N :], strict=True):
                values.append(value)
            step += 1
        results = [*state, *(np.stack(v) if v else np.empty(0, np.float32) for v in scanned)]
        return tuple(self._check_and_fix_outputs(tuple(results)))


def evaluator(model: ModelProto) -> ReferenceEvaluator:
    """Returns onnx's evaluator for a model.

    Raises:
        Exception: the evaluator refuses the model; there are several error classes.
    """
    return ReferenceEvaluator(model, new_ops=[Loop])

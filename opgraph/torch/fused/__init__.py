"""FusedOp: a graph as one differentiable torch op, under autograd and torch's other modes and transforms."""

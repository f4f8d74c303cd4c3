"""FusedOp: a graph as one differentiable torch op, under autograd and everything around it."""

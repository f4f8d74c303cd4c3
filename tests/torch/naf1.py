"""NAF1, which ships with opgraph, under the name that the tests here know."""

from opgraph.torch.naf1 import NAF1, gamma, with_order

__all__ = ["NAF1", "gamma", "with_order"]

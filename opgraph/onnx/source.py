"""What a graph remembers of the model that it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field

from opgraph.onnx.origin import Origin


@dataclass(slots=True, eq=False)
class Source:
    """A model and how a graph's parts correspond to it; `Graph.source` of a graph that `load` made.

    Attributes:
        origin: the model, functions of others unfolded. Never changed after reading.
        node_of: op id -> index of its node in the main graph. Several ops may share one.
        value_of: tensor id -> name of its value.
    """

    origin: Origin
    node_of: dict[int, int] = field(default_factory=dict)
    value_of: dict[int, str] = field(default_factory=dict)

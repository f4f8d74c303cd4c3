"""The link from a graph to the model that it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field

from opgraph.onnx.origin import Origin


@dataclass(slots=True, eq=False)
class Source:
    """A model, and the mapping from a graph's parts to it; the `Graph.source` of a graph returned by `load`.

    Attributes:
        origin: the model, with foreign functions unfolded. Never changed after reading.
        node_of: op id -> index of its node in the main graph. Several ops may share one.
        value_of: tensor id -> name of its value.
    """

    origin: Origin
    node_of: dict[int, int] = field(default_factory=dict)
    value_of: dict[int, str] = field(default_factory=dict)

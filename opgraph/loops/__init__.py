"""The loop form: what one kernel does, as a small value that prints, parses back and runs in NumPy.

- The value: `loop`, checked by `verify`, its text form `text`, op by op in a library of arrays `interpret`.
- How it is made: `lower`, from the `steps` of a partition; `hoist_factors` takes out of a row's sum what is one for
  the row.
- What a call's shapes make of it: `space` (what operands broadcast to), `axis_splits` (axes taken for several),
  `layout` (the space collapsed, and the letters that say how operands move: what a kernel depends on).

How a kernel iterates over it is decided in `opgraph.schedule`.
"""

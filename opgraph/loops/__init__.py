"""The loop form: the computation of one kernel, as a small value that prints, parses back and runs in NumPy.

- The value: `loop`. `verify` checks it, `text` prints and parses it, `interpret` runs it op by op in an array library.
- Its construction: `lower`, from the `steps` of a partition; `hoist_factors` moves factors that are one number for a
  row out of the row's sum.
- Its binding to the shapes of a call: `space` (the shape to which operands broadcast), `axis_splits` (axes split into
  several), `layout` (the collapsed space, and one letter per operand for its movement; a kernel depends on these).

`opgraph.schedule` decides how a kernel iterates over it.
"""

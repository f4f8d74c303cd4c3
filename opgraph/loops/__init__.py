"""The loop form: what one kernel does, as a small value that prints, parses back and runs in NumPy.

- The value: `loop`, checked by `verify`, its text form `text`, op by op in a library of arrays `interpret`.
- How it is made: `lower`, from the `steps` of a partition; `factors` takes out of a row's sum what is one for the row.
- What a call's shapes make of it: `space` (what operands broadcast to), `cuts` (axes taken for several), `layout` (the
  space collapsed, and the letters that say how operands move: what a kernel depends on).
- How elements are walked: `short_rows` makes rows long, `boxes` (CPU) and `tiles` (CUDA) cut a space with sums.
- How rows are walked: `passes` over one; `at_once` chooses between rows in a few vectors, `beside` each other, in
  `groups` or one after the other; `column_sums` and `few_columns` are for few long ones; `apart` (CUDA) adds up sums by
  a loop of their own.
"""

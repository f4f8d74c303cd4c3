"""From a loop and a layout to a schedule: how a kernel iterates, decided in one place for both targets.

- The decision: `table` has a row for each schedule, and `choose_schedule`. `schedule` has the schedule type and the
  names of the rows. `cpu` and `cuda` hold the criteria of each target: widths, sizes of tiles, costs.
- Changes of the layout: `merged_axes` walks two axes as one, `interleaved_rows` and `grouped_rows` use neighbouring
  rows as lanes, `split_columns` cuts few long columns, `loop_fission` splits one loop into several.
- The iteration of a CPU kernel's body over elements: `cpu_body`.
- Tiles: `cpu_tiles`; `cuda_tiles` and `cuda_row_tiles`. Tile arguments of a CPU kernel: `cpu_arguments`.
- Properties that the choice depends on: `levels` (when a value changes, the cost of an element), `reduction_passes`
  (passes over a row), `row_registers` (values in a thread's registers), `fast_math` (statements that may be
  approximate).
"""

"""From a loop and a layout to a schedule: how a kernel iterates, decided in one place for both targets.

- The decision: `table` has a row for each schedule, and `choose_schedule`; `schedule` has the value and the names of
  the rows. `cpu` and `cuda` hold what each target decides by: widths, sizes of tiles, costs.
- What a schedule makes of a layout: `merged_axes` walks two axes as one, `interleaved_rows` and `grouped_rows` make
  lanes of neighbouring rows, `split_columns` cuts few long columns, `loop_fission` makes several loops of one.
- How the body of a CPU kernel goes over elements: `cpu_body`.
- Tiles: `cpu_tiles`; `cuda_tiles` and `cuda_row_tiles`. What a CPU kernel is told of them: `cpu_arguments`.
- What they are chosen by: `levels` (when a value changes, what an element costs), `reduction_passes` (walks over a
  row), `row_registers` (what waits in a thread's registers), `fast_math` (statements that may be approximate).
"""

"""From a loop to C++ source text.

A kernel is a skeleton of `kernels/`, the functor of one loop and an entry point: `kernel` puts them together as a
schedule (`opgraph.schedule`) says. `sources` has the text of the skeleton, of which `prune_source` leaves what the
kernel needs. A functor is written by functions over an `emitter`, which has its lines and what all of them share; the
base of it, `arithmetic`, spells statements.

- Elements: `emit`. On the CPU `lanes` (16 at a time; conversion of f16), `branch_compaction` (either side of a
  choice), `strip_mining` (large kernels); on CUDA `packs` and `partial_unroll` (few of their elements in the text).
- Rows: `row_reductions` says what reductions make of them. On the CPU `rows`, with `row_buffers` (passes, what waits),
  `row_passes` (their elements) and `prefetch` (what is asked of memory); on CUDA `cuda_row_functor`, with
  `opgraph.schedule.row_registers`. `reduction_finalize`: what is added up over the whole loop.
- Statements that have a form of their own: `shifts` (exponentials), `outlining` (functions that costly ones share).
- Launches on CUDA: `cuda_rows.launches`, of a schedule with rows or sums (`cuda_sums`).

An op needs nothing here: its record names the function of `kernels/` that computes it.
"""

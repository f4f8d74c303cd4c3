"""From a loop to C++ source text.

A kernel consists of a skeleton of `kernels/`, the functor of one loop and an entry point. `kernel` combines them for a
schedule (`opgraph.schedule`). `sources` has the text of the skeleton; `prune_source` keeps the part that the kernel
needs. Functions write a functor through an `emitter`, which collects its lines and has their common parts. Its base,
`arithmetic`, writes statements.

- Elements: `emit`. On the CPU `lanes` (16 at a time; conversion of f16), `branch_compaction` (either side of a
  choice), `strip_mining` (large kernels); on CUDA `packs` and `partial_unroll` (few of their elements in the text).
- Rows: `row_reductions` has their reductions. On the CPU `rows`, with `row_buffers` (passes, values kept for a later
  one), `row_passes` (their elements) and `prefetch`; on CUDA `cuda_row_functor`, with
  `opgraph.schedule.row_registers`. `reduction_finalize`: sums over the whole loop.
- Statements with a special form: `shifts` (exponentials), `outlining` (functions shared by costly statements).
- Launches on CUDA: `cuda_rows.launches`, for a schedule with rows or sums (`cuda_sums`).

A new op needs no code here: its record names the function of `kernels/` that computes it.
"""

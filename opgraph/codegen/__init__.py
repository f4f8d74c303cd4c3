"""From a loop to C++ source text.

A kernel is a skeleton of `kernels/`, the functor of one loop and an entry point: `kernel` puts them together, with the
text of the skeleton from `sources` as far as it is `needed`. A `functor` is written by functions over an `emitter`,
which has its lines and what all of them share; the base of it, `arithmetic`, spells statements.

- Elements: `emit`. On the CPU `lanes` (16 at a time; conversion of f16), `branches` (either side of a choice),
  `strips` (large kernels); on CUDA `packs` and `rolled` (few of their elements in the text).
- Rows: `row_reductions` says what reductions make of them. On the CPU `rows`, with `row_buffers` (passes, what waits),
  `row_passes` (their elements) and `row_ahead` (what is asked of memory); on CUDA `cuda_row_functor`, with
  `cuda_row_reads`. `totals`: what is added up over the whole loop.
- Statements that have a form of their own: `tier` (16 bits), `shifts` (exponentials), `shared`.
- Launches on CUDA: `kernel.cuda_variant`, `cuda_sums`, `cuda_rows` with `cuda_row_cut`.

An op needs nothing here: its record names the function of `kernels/` that computes it.
"""

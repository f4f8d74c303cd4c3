#pragma once
#include "scalar.h"

// The CPU skeleton: cuts the iteration space into chunks, hands them to threads, walks rows, and lets the compiler
// vectorise the innermost loop over Fused::element.

namespace og {

// GCC: no dependence between iterations (an output may be an input, but then element by element).
#if defined(__clang__)
#define OG_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define OG_VECTORIZE _Pragma("GCC ivdep")
#endif


// What one call works on. `layout` holds rank, then the extents, then the strides (in elements) of each operand.
struct Space {
  void* const* base;
  i64 rank, size, inner;
  const i64* dims;
  const i64* strides;
  bool streaming;  // results are large: write them past the caches
};

enum { block = 512 };  // elements that a streamed result gathers in the first-level cache

#if defined(__x86_64__)
typedef long long v2di __attribute__((vector_size(16)));
#endif

// Copies to memory without reading the target's cache lines first (torch's copy does the same; on large arrays a plain
// store moves half as many bytes again). The fence at the end of a chunk orders these stores before what follows.
OG_FN void stream_copy(char* to, const char* from, i64 bytes) {
#if defined(__x86_64__)
  i64 head = (i64)(-(u64)to & 15u);
  if (head > bytes) head = bytes;
  __builtin_memcpy(to, from, (u64)head);
  i64 i = head;
  for (; i + 16 <= bytes; i += 16) {
    v2di pack;
    __builtin_memcpy(&pack, from + i, 16);
#if defined(__clang__)
    __builtin_nontemporal_store(pack, (v2di*)(to + i));
#else
    __builtin_ia32_movntdq((v2di*)(to + i), pack);
#endif
  }
  __builtin_memcpy(to + i, from + i, (u64)(bytes - i));
#else
  __builtin_memcpy(to, from, (u64)bytes);
#endif
}

template <class F> OG_FN void span(const F f, i64 begin, i64 end) {
  OG_VECTORIZE
  for (i64 i = begin; i < end; ++i) f.element(i, i);
}

// Every store is contiguous here: results gather in a buffer that stays in the first-level cache, then stream out.
template <class F> OG_FN void streamed_span(const F f, void* const* rows, i64 begin, i64 end) {
  constexpr int stores = F::operands - F::first_store;
  alignas(64) char buffers[stores][block * 8];
  void* buffer[stores];
  for (int s = 0; s < stores; ++s) buffer[s] = buffers[s];
  F g = f;
  g.redirect(buffer);
  for (i64 i = begin; i < end; i += block) {
    const i64 n = end - i < block ? end - i : block;
    const F h = g;
    OG_VECTORIZE
    for (i64 k = 0; k < n; ++k) h.element(i + k, k);
    for (int s = 0; s < stores; ++s) {
      const i64 size = F::store_size(s);
      stream_copy((char*)rows[s] + i * size, buffers[s], n * size);
    }
  }
}

// Elements [begin, end) of the space, in row-major order.
template <class F, bool streaming> void range(const Space& space, i64 begin, i64 end) {
  constexpr int n = F::operands, stores = F::operands - F::first_store;
  enum { max_rank = 64 };
  const i64 rank = space.rank, inner = space.inner;
  i64 step[n], offset[n], at[max_rank];
  for (int k = 0; k < n; ++k) {
    step[k] = space.strides[k * rank + rank - 1];
    offset[k] = 0;
  }
  i64 row = begin / inner, column = begin % inner;
  for (i64 d = rank - 2; d >= 0; --d) {
    at[d] = row % space.dims[d];
    row /= space.dims[d];
    for (int k = 0; k < n; ++k) offset[k] += at[d] * space.strides[k * rank + d];
  }
  F f;
  f.steps(step);
  f.move(space.base, offset);
  f.call();
  while (begin < end) {
    const i64 length = end - begin < inner - column ? end - begin : inner - column;
    f.move(space.base, offset);
    f.row();
    if constexpr (streaming) {
      void* rows[stores];
      for (int s = 0; s < stores; ++s) {
        const int k = F::first_store + s;
        rows[s] = (char*)space.base[k] + offset[k] * F::store_size(s);
      }
      streamed_span(f, rows, column, column + length);
    } else {
      span(f, column, column + length);
    }
    begin += length;
    column = 0;
    for (i64 d = rank - 2; d >= 0; --d) {  // the next row, like an odometer
      for (int k = 0; k < n; ++k) offset[k] += space.strides[k * rank + d];
      if (++at[d] < space.dims[d]) break;
      at[d] = 0;
      for (int k = 0; k < n; ++k) offset[k] -= space.dims[d] * space.strides[k * rank + d];
    }
  }
#if defined(__x86_64__)
  if constexpr (streaming) __builtin_ia32_sfence();
#endif
}

// Threads take chunks off a counter. Which thread computes an element never changes its bits.
struct Team {
  const Space* space;
  i64 next, chunk;
};

template <class F, bool streaming> void work(void* data) {
  Team* team = (Team*)data;
  for (;;) {
    const i64 begin = __atomic_fetch_add(&team->next, team->chunk, __ATOMIC_RELAXED);
    if (begin >= team->space->size) return;
    const i64 end = begin + team->chunk < team->space->size ? begin + team->chunk : team->space->size;
    range<F, streaming>(*team->space, begin, end);
  }
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

template <class F, bool streaming> void run(const Space& space, i64 threads, Parallel parallel) {
  if (threads < 2 || parallel == nullptr) return range<F, streaming>(space, 0, space.size);
  const i64 pieces = threads * 4;  // a few for each, so that a thread that starts late is not waited for
  Team team = {&space, 0, ((space.size + pieces - 1) / pieces + block - 1) / block * block};
  parallel(work<F, streaming>, &team, (unsigned)threads, 0);
}

// layout: [rank, size, may stream, extents..., strides of operand 0..., ...]. `parallel` is GOMP_parallel, or null.
// begin and end: the elements to do; 0 and size, unless the caller brings its own threads.
template <class F, bool may_stream>
OG_FN void launch(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[2 + rank], layout + 3, layout + 3 + rank, layout[2] != 0};
  if (begin >= end) return;
  if constexpr (may_stream) {
    if (space.streaming && begin == 0 && end == space.size) return run<F, true>(space, threads, parallel);
  }
  if (begin == 0 && end == space.size) return run<F, false>(space, threads, parallel);
  range<F, false>(space, begin, end);
}

}  // namespace og

#pragma once
#include "config.h"

// Copies with rows and columns exchanged.

namespace og {

/// The type that moves elements of so many bytes.
template <int bytes> struct bits_of;
template <> struct bits_of<1> { using type = u8; };
template <> struct bits_of<2> { using type = u16; };
template <> struct bits_of<4> { using type = u32; };
template <> struct bits_of<8> { using type = u64; };

// Transposes 8 rows of 8 elements, in three rounds that interleave the two halves.
template <class T> OG_FN void transpose_eight(T* to, i64 to_step, const T* from, i64 from_step) {
  typedef T Eight __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));
  Eight a[8], b[8];
  each<8>([&](auto i) { a[i.value] = *(const Eight*)(from + i.value * from_step); });
  const auto interleave = [](Eight* x, const Eight* y) {
    each<4>([&](auto i) {
      x[2 * i.value] = __builtin_shufflevector(y[i.value], y[i.value + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      x[2 * i.value + 1] = __builtin_shufflevector(y[i.value], y[i.value + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    });
  };
  interleave(b, a);
  interleave(a, b);
  interleave(b, a);
  each<8>([&](auto i) { *(Eight*)(to + i.value * to_step) = b[i.value]; });
}

// to[j * to_step + i * to_each] = from[i * from_step + j * from_each] for i < rows, j < columns.
template <class T>
OG_FN void transpose_each(T* to, i64 to_step, i64 to_each, const T* from, i64 from_step, i64 from_each, i64 rows, i64 columns) {
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; ++j) to[j * to_step + i * to_each] = from[i * from_step + j * from_each];
}
// The same for the rest at the edges of blocks.
template <class T>
OG_ONCE void transpose_rest(T* to, i64 to_step, i64 to_each, const T* from, i64 from_step, i64 from_each, i64 rows, i64 columns) {
  transpose_each(to, to_step, to_each, from, from_step, from_each, rows, columns);
}
template <class T>
OG_FN void transpose(T* to, i64 to_step, i64 to_each, const T* from, i64 from_step, i64 from_each, i64 rows, i64 columns) {
  if (to_each == 1 && from_each == 1) {
    const i64 whole_rows = rows & -8, whole_columns = columns & -8;
    for (i64 i = 0; i < whole_rows; i += 8)
      for (i64 j = 0; j < whole_columns; j += 8)
        transpose_eight(to + j * to_step + i, to_step, from + i * from_step + j, from_step);
    transpose_rest(to + whole_columns * to_step, to_step, to_each, from + whole_columns, from_step, from_each, whole_rows,
              columns - whole_columns);
    transpose_rest(to + whole_rows, to_step, to_each, from + whole_rows * from_step, from_step, from_each, rows - whole_rows,
              columns);
    return;
  }
  transpose_each(to, to_step, to_each, from, from_step, from_each, rows, columns);
}

}  // namespace og

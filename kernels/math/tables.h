#pragma once
#include "config.h"
#include "math/exp.h"
#include "math/lanes.h"

// Functions by table, on the CPU alone: a polynomial for each of 32 intervals. For 16 floats, one instruction looks up
// each coefficient (vpermt2ps, which costs as much as a multiplication); for one float, an index does: the same bits.
// Machines without AVX-512, and GPUs, have no such instruction and keep the forms without a table (OG_TABLES is 0):
// with AVX2 tables take up to 1.9 times as long.
//
// Row 0 of a table has the point that an interval is expanded about, chosen near its middle so that the constant term,
// in the last row, is nearly a float; the highest power comes first. Own weighted fits (Lawson), each with its error.

#if !OG_DEVICE && !defined(OG_NO_TABLES) && defined(__AVX512F__)
#define OG_TABLES 1

namespace og {

enum { intervals = 32 };

OG_FN float lookup(const float* row, u32 i) { return row[i % intervals]; }
OG_FN u32 shifted(u32 bits, int right) { return bits >> right; }
/// |x|, or the bound if |x| is larger or NaN.
OG_FN float size_within(float x, float bound) {
  const float size = abs(x);
  return size < bound ? size : bound;
}

#if OG_LANES
OG_FN floats lookup(const float* row, words i) {
  floats16 low, high;
  __builtin_memcpy(&low, row, sizeof(low));
  __builtin_memcpy(&high, row + lane_count, sizeof(high));
  return __builtin_ia32_vpermt2varps512_mask((ints16)i.v, low, high, all16);
}
OG_FN words shifted(words bits, int right) { return bits.v >> (u32)right; }
OG_FN words operator^(words a, words b) { return a.v ^ b.v; }
// Not by vrangeps, which does both at once: on Intel's cores it waits for the old value of its result's register.
OG_FN floats size_within(floats x, floats bound) { return smaller(abs(x), bound); }
#endif

/// p times h^(rows - k), plus the terms of the rows from k on.
template <int k, int rows, class F, class I> OG_FN F and_rows(const float (&table)[rows][intervals], I i, F h, F p) {
  if constexpr (k == rows) return p;
  else return and_rows<k + 1>(table, i, h, fma(p, h, lookup(table[k], i)));  // no loop: GCC would not unroll it
}
/// The polynomial of interval i (its last 5 bits) at t.
template <int rows, class F, class I> OG_FN F by_table(const float (&table)[rows][intervals], I i, F t) {
  return and_rows<2>(table, i, t - lookup(table[0], i), lookup(table[1], i));
}

/// The interval of t in [0, 15): 8 of them from 0 to 1, from 1 to 3, from 3 to 7, and from 7 to 15.
template <class F> OG_FN auto interval_of(F t) { return shifted(bits(t + 1), 20); }
/// The interval of t in [0, 5.3]. All are equally wide in t (t + 3.25): narrower where the function is steeper.
template <class F> OG_FN auto interval_by_square(F t) {
  return bits(fma(t, fma(t, (F)0x1.6357fep-1f, (F)(3.25f * 0x1.6357fep-1f)), (F)0x1.8p23f));
}
/// The interval of size = |x|: 4 of them from 0 to 4 / 3, to 4, to 28 / 3 and for all others. The sign of x gives other
/// intervals: it is moved to a bit of the exponent that carries no information.
template <class F> OG_FN auto interval_of(F size, F x) {
  const F bounded = smaller(fma(size, (F)0.75f, (F)1), (F)15.5f);
  return shifted(bits(bounded) ^ (shifted(bits(x), 6) & 0x02000000u), 21);
}

/// Phi(-t) for 0 <= t <= 5.3; relative error 2^-26.
alignas(64) static const float lower_tail[7][32] = {
    {0x1.b392ecp-4f, 0x1.8c610cp-2f, 0x1.71b89ep-1f, 0x1.025314p+0f, 0x1.45823ap+0f, 0x1.8229c4p+0f, 0x1.bc7166p+0f,
     0x1.f1daf4p+0f, 0x1.12105ap+1f, 0x1.29a072p+1f, 0x1.40b438p+1f, 0x1.5643eep+1f, 0x1.6b696ap+1f, 0x1.7f4d5ap+1f,
     0x1.92f6e6p+1f, 0x1.a619dep+1f, 0x1.b8b688p+1f, 0x1.ca9ee8p+1f, 0x1.dc643cp+1f, 0x1.ed4e3ep+1f, 0x1.fdd5fep+1f,
     0x1.070742p+2f, 0x1.0ee56ep+2f, 0x1.16e134p+2f, 0x1.1e91dep+2f, 0x1.2600b6p+2f, 0x1.2d268ap+2f, 0x1.345fdep+2f,
     0x1.3b77bap+2f, 0x1.428f32p+2f, 0x1.4965dcp+2f, 0x1.500f66p+2f},
    {-0x1.3cbd86p-7f, -0x1.a7934ep-8f, -0x1.927652p-12f, 0x1.107e06p-8f, 0x1.8b9cp-8f, 0x1.7c4c3ep-8f,
     0x1.2201aep-8f, 0x1.63d3bap-9f, 0x1.35caa4p-10f, 0x1.7fc5acp-15f, -0x1.61304ep-11f, -0x1.110eecp-10f,
     -0x1.2fa168p-10f, -0x1.21a1f2p-10f, -0x1.feb17ap-11f, -0x1.a756cp-11f, -0x1.4fa90cp-11f, -0x1.01051p-11f,
     -0x1.7ea1e2p-12f, -0x1.169086p-12f, -0x1.8d718cp-13f, -0x1.16edb4p-13f, -0x1.8113b6p-14f, -0x1.06592cp-14f,
     -0x1.60daa6p-15f, -0x1.d5d872p-16f, -0x1.35470cp-16f, -0x1.9444c6p-17f, -0x1.05bcccp-17f, -0x1.4fe728p-18f,
     -0x1.ac9838p-19f, -0x1.12cf52p-19f},
    {-0x1.56a83ep-8f, -0x1.14d4ecp-6f, -0x1.75f062p-6f, -0x1.467a8cp-6f, -0x1.aa87b6p-7f, -0x1.7e6e16p-8f,
     0x1.242086p-14f, 0x1.f17a76p-9f, 0x1.747432p-8f, 0x1.97b4fp-8f, 0x1.835a36p-8f, 0x1.528ad6p-8f, 0x1.16188ap-8f,
     0x1.b7be94p-9f, 0x1.4e1f54p-9f, 0x1.ecba1cp-10f, 0x1.62751p-10f, 0x1.f57544p-11f, 0x1.5a1b26p-11f,
     0x1.daaa9p-12f, 0x1.410d3p-12f, 0x1.ac69f8p-13f, 0x1.1bc104p-13f, 0x1.6e84bp-14f, 0x1.d877f8p-15f,
     0x1.2ff05p-15f, 0x1.87b43ap-16f, 0x1.ef0584p-17f, 0x1.36d96ap-17f, 0x1.80ec9p-18f, 0x1.de667ep-19f,
     0x1.291fb6p-19f},
    {0x1.0bbeeap-4f, 0x1.ada114p-5f, 0x1.91af02p-6f, -0x1.7e8f66p-11f, -0x1.2b606ap-6f, -0x1.bd5ffp-6f,
     -0x1.e6228ep-6f, -0x1.c962d8p-6f, -0x1.8a8d56p-6f, -0x1.418dd4p-6f, -0x1.f24d68p-7f, -0x1.7763cep-7f,
     -0x1.1153aap-7f, -0x1.88092ep-8f, -0x1.118cb8p-8f, -0x1.76750ap-9f, -0x1.f84f1p-10f, -0x1.506e96p-10f,
     -0x1.b7f3p-11f, -0x1.1f799ep-11f, -0x1.73f2bcp-12f, -0x1.dc324ep-13f, -0x1.2f900ep-13f, -0x1.79cb82p-14f,
     -0x1.d69c36p-15f, -0x1.25449p-15f, -0x1.6efeeep-16f, -0x1.c29b3cp-17f, -0x1.13505ap-17f, -0x1.4bf826p-18f,
     -0x1.92755ap-19f, -0x1.e863cep-20f},
    {0x1.599352p-6f, 0x1.256e7ap-4f, 0x1.c694bap-4f, 0x1.ef8396p-4f, 0x1.cee68ap-4f, 0x1.8b10e8p-4f, 0x1.3a4886p-4f,
     0x1.df981p-5f, 0x1.618656p-5f, 0x1.fd051cp-6f, 0x1.62d9eep-6f, 0x1.e9a4fp-7f, 0x1.49b716p-7f, 0x1.ba0a8ep-8f,
     0x1.21ed82p-8f, 0x1.77274p-9f, 0x1.dfe41ap-10f, 0x1.317c4ep-10f, 0x1.7e3782p-11f, 0x1.dfdb6cp-12f,
     0x1.2afc9ep-12f, 0x1.717944p-13f, 0x1.c7bb12p-14f, 0x1.128ef4p-14f, 0x1.4bdba2p-15f, 0x1.921786p-16f,
     0x1.ea135cp-17f, 0x1.252ca4p-17f, 0x1.5d7ecep-18f, 0x1.9b638cp-19f, 0x1.e79094p-20f, 0x1.218754p-20f},
    {-0x1.9636acp-2f, -0x1.7b0794p-2f, -0x1.3ac294p-2f, -0x1.eb0e72p-3f, -0x1.6c0db6p-3f, -0x1.05e6e4p-3f,
     -0x1.6a0e24p-4f, -0x1.ed3826p-5f, -0x1.4a3924p-5f, -0x1.b5d3b4p-6f, -0x1.1b41fcp-6f, -0x1.6e3baep-7f,
     -0x1.d086ap-8f, -0x1.273b12p-8f, -0x1.7060aep-9f, -0x1.c70dcp-10f, -0x1.16c208p-10f, -0x1.550ab2p-11f,
     -0x1.9ac96ap-12f, -0x1.f20af2p-13f, -0x1.2c41acp-13f, -0x1.679a14p-14f, -0x1.aeabfep-15f, -0x1.f81166p-16f,
     -0x1.28753ep-16f, -0x1.5e1e6p-17f, -0x1.a099fap-18f, -0x1.e6c3c2p-19f, -0x1.1b9d4p-19f, -0x1.468044p-20f,
     -0x1.7aeccep-21f, -0x1.b91beep-22f},
    {0x1.d4a3b8p-2f, 0x1.65babep-2f, 0x1.e182e2p-3f, 0x1.407258p-3f, 0x1.a0dbd6p-4f, 0x1.0d302p-4f, 0x1.521aeep-5f,
     0x1.a863d2p-6f, 0x1.084e98p-6f, 0x1.48ad1p-7f, 0x1.90ae9ap-8f, 0x1.eb48d4p-9f, 0x1.2870cep-9f, 0x1.6840fp-10f,
     0x1.aeb52p-11f, 0x1.ff2454p-12f, 0x1.2d8b44p-12f, 0x1.64349p-13f, 0x1.9ed17p-14f, 0x1.e77e06p-15f,
     0x1.1d5056p-15f, 0x1.4c2a26p-16f, 0x1.834c56p-17f, 0x1.b97098p-18f, 0x1.fa7542p-19f, 0x1.241928p-19f,
     0x1.53efdcp-20f, 0x1.848f02p-21f, 0x1.bb5164p-22f, 0x1.f3e324p-23f, 0x1.1c716ep-23f, 0x1.44f7dap-24f},
};

/// R(t) - t / sqrt(2 pi); error 2^-25.8 of the larger of this and its condition, see derivatives.h.
alignas(64) static const float tail_slope[6][32] = {
    {0x1.1ff52p+0f, 0x1.6003a6p+0f, 0x1.9ffe4p+0f, 0x1.dff796p+0f, 0x1.100386p+1f, 0x1.30085ep+1f, 0x1.5008dep+1f,
     0x1.6ffe62p+1f, 0x1.9ff26p+1f, 0x1.dff0ccp+1f, 0x1.100344p+2f, 0x1.300946p+2f, 0x1.500586p+2f, 0x1.6ff334p+2f,
     0x1.8ff51cp+2f, 0x1.b001p+2f, 0x1.dff446p+2f, 0x1.0ff554p+3f, 0x1.300a66p+3f, 0x1.4ffe7ap+3f, 0x1.6ff9bp+3f,
     0x1.8ff608p+3f, 0x1.b00178p+3f, 0x1.cff63ap+3f, 0x1.0002f4p-4f, 0x1.800d34p-3f, 0x1.3ff0fep-2f, 0x1.c0082cp-2f,
     0x1.1ff7dep-1f, 0x1.600b6cp-1f, 0x1.9ff268p-1f, 0x1.dff0c6p-1f},
    {0x1.ea668ap-8f, 0x1.494782p-8f, 0x1.c0eac4p-9f, 0x1.376e36p-9f, 0x1.b2446cp-10f, 0x1.39965cp-10f, 0x1.ca809ap-11f,
     0x1.52c2bep-11f, 0x1.bccd96p-12f, 0x1.05783ep-12f, 0x1.3e9dp-13f, 0x1.958f3cp-14f, 0x1.0b6c18p-14f,
     0x1.6bb296p-15f, 0x1.f97ee4p-16f, 0x1.63fae8p-16f, 0x1.c0bacep-17f, 0x1.f1793ep-18f, 0x1.2a163cp-18f,
     0x1.702912p-19f, 0x1.da7cp-20f, 0x1.3c0904p-20f, 0x1.bf3242p-21f, 0x1.3d5f78p-21f, 0x1.c088dep-5f, 0x1.5a347ap-5f,
     0x1.0d54dap-5f, 0x1.a68f1ap-6f, 0x1.4c29a8p-6f, 0x1.078018p-6f, 0x1.a4f1cep-7f, 0x1.5220bap-7f},
    {-0x1.578512p-6f, -0x1.e4c07ep-7f, -0x1.5cccc6p-7f, -0x1.ff0aeap-8f, -0x1.7c839cp-8f, -0x1.1f8b4ap-8f,
     -0x1.b8bb8ep-9f, -0x1.566b8cp-9f, -0x1.e0c91ep-10f, -0x1.35be78p-10f, -0x1.9df3b6p-11f, -0x1.1d9b68p-11f,
     -0x1.95541ep-12f, -0x1.26c3bcp-12f, -0x1.b58a7ep-13f, -0x1.4bb2cap-13f, -0x1.c35802p-14f, -0x1.1b0c74p-14f,
     -0x1.72faf6p-15f, -0x1.fb0104p-16f, -0x1.65f12p-16f, -0x1.033422p-16f, -0x1.7d1f16p-17f, -0x1.1fac84p-17f,
     -0x1.e52aa2p-4f, -0x1.82469p-4f, -0x1.35b4cap-4f, -0x1.f3e008p-5f, -0x1.9632dap-5f, -0x1.4bed86p-5f,
     -0x1.10f7ccp-5f, -0x1.c370ap-6f},
    {0x1.b66ffp-5f, 0x1.49fd6ep-5f, 0x1.f9a8acp-6f, 0x1.89a516p-6f, 0x1.36d5a8p-6f, 0x1.f17d84p-7f, 0x1.930698p-7f,
     0x1.4a3b56p-7f, 0x1.f318f4p-8f, 0x1.623a24p-8f, 0x1.0313c4p-8f, 0x1.850cd4p-9f, 0x1.2ad582p-9f, 0x1.d44592p-10f,
     0x1.74f128p-10f, 0x1.2d69ap-10f, 0x1.c11598p-11f, 0x1.3b0bd2p-11f, 0x1.c9bd04p-12f, 0x1.56f338p-12f,
     0x1.074a48p-12f, 0x1.9cc87p-13f, 0x1.49460cp-13f, 0x1.0aee0ep-13f, 0x1.cfce2ep-3f, 0x1.7e8fe2p-3f, 0x1.3db51p-3f,
     0x1.097848p-3f, 0x1.be7a64p-4f, 0x1.7987eap-4f, 0x1.412a6cp-4f, 0x1.129df6p-4f},
    {-0x1.0b370cp-1f, -0x1.fe979cp-2f, -0x1.ec8458p-2f, -0x1.de8fc2p-2f, -0x1.d39b76p-2f, -0x1.cae768p-2f,
     -0x1.c3e6ap-2f, -0x1.be3418p-2f, -0x1.b778c2p-2f, -0x1.b0e368p-2f, -0x1.ac23fp-2f, -0x1.a8a00cp-2f,
     -0x1.a5f5ap-2f, -0x1.a3e544p-2f, -0x1.a242ecp-2f, -0x1.a0f2eap-2f, -0x1.9f6c8ep-2f, -0x1.9df3e8p-2f,
     -0x1.9ce648p-2f, -0x1.9c2038p-2f, -0x1.9b89e8p-2f, -0x1.9b154ep-2f, -0x1.9ab8f2p-2f, -0x1.9a6ee2p-2f,
     -0x1.8948aap-1f, -0x1.6eed32p-1f, -0x1.5921dp-1f, -0x1.46f408p-1f, -0x1.37bcf4p-1f, -0x1.2ae246p-1f,
     -0x1.200316p-1f, -0x1.16ba16p-1f},
    {-0x1.a08c06p-3f, -0x1.52e04p-2f, -0x1.d01f86p-2f, -0x1.24b164p-1f, -0x1.5fdb7ap-1f, -0x1.99c74p-1f,
     -0x1.d2b116p-1f, -0x1.055eacp+0f, -0x1.2ed4ap+0f, -0x1.655308p+0f, -0x1.9b31cep+0f, -0x1.d0856p+0f,
     -0x1.02b354p+1f, -0x1.1cf27p+1f, -0x1.3724c2p+1f, -0x1.5147c4p+1f, -0x1.7841p+1f, -0x1.ac0ddap+1f,
     -0x1.dfdc9ep+1f, -0x1.09ac9cp+2f, -0x1.2365dep+2f, -0x1.3d17c2p+2f, -0x1.56cf46p+2f, -0x1.706f6cp+2f,
     0x1.cde6ap-2f, 0x1.6ef69ap-2f, 0x1.161952p-2f, 0x1.843198p-3f, 0x1.c97fd6p-4f, 0x1.3001fp-5f, -0x1.19b32ap-5f,
     -0x1.a811fp-4f},
};

/// The derivative of mish, for x < 0 divided by e^x, by |x| in 16 intervals for each sign; error 2^-24.9. From
/// 52 / 3 on it is 1, and 1 + x.
alignas(64) static const float mish_slope[8][32] = {
    {0x1.aaac94p+0f, 0x1.2aab3cp+1f, 0x1.7ffd1cp+1f, 0x1.d552bcp+1f, 0x1.2aa83ap+2f, 0x1.800208p+2f, 0x1.d55236p+2f,
     0x1.155876p+3f, 0x1.555876p+3f, 0x1.aaadcap+3f, 0x1.00032p+4f, 18.0f, 0x1.55574p-3f, 0x1.0001c6p-1f,
     0x1.aaa9f8p-1f, 0x1.2aa9cap+0f, 0x1.aaa90ep+0f, 0x1.2aaa3p+1f, 0x1.7ffd7p+1f, 0x1.d552bcp+1f, 0x1.2aaaecp+2f,
     0x1.8001cep+2f, 0x1.d55644p+2f, 0x1.1554ap+3f, 0x1.555876p+3f, 0x1.aaa78ap+3f, 0x1.fff9cp+3f, 18.0f,
     0x1.55569ep-3f, 0x1.ffffdcp-2f, 0x1.aaa8bep-1f, 0x1.2aa7ecp+0f},
    {0x1.e6997p-8f, -0x1.5a7c82p-11f, -0x1.a594ep-11f, -0x1.586976p-13f, 0x1.bd5306p-17f, 0x1.4b6846p-18f,
     -0x1.6c91c8p-17f, 0x1.513dc4p-18f, 0x1.07e51p-23f, 0x1.9c2d6ap-31f, 0x1.33c7ap-38f, 0.0f, -0x1.086294p-6f,
     -0x1.ca387p-9f, 0x1.6a991cp-8f, 0x1.6dbf04p-8f, 0x1.a0bf36p-10f, -0x1.83cef6p-12f, -0x1.3a1abcp-12f,
     -0x1.eb4cp-14f, -0x1.ac4368p-16f, -0x1.20e40ap-19f, 0x1.de682ap-21f, 0x1.6128a4p-21f, 0x1.eab3d6p-20f,
     -0x1.e1e5fep-21f, -0x1.c61f1ep-21f, 0.0f, -0x1.c0cac8p-8f, -0x1.83d3fp-6f, -0x1.7aae6p-7f, 0x1.9d5d5ep-8f},
    {-0x1.212712p-8f, 0x1.823188p-8f, 0x1.e4e9f6p-10f, 0x1.aaf47ep-14f, -0x1.b937bp-14f, -0x1.3e411ap-16f,
     -0x1.0fd9b6p-19f, -0x1.872e3ep-23f, -0x1.724c82p-28f, -0x1.37f5bap-35f, -0x1.db9ecp-43f, 0.0f, -0x1.049ebap-8f,
     -0x1.8ed61ep-6f, -0x1.52f23ep-6f, -0x1.22d82ep-7f, 0x1.914d5ep-10f, 0x1.5c5ffp-9f, 0x1.3e8f44p-10f,
     0x1.d3fc5ep-12f, 0x1.3b0efep-14f, -0x1.5970acp-17f, -0x1.3f3232p-17f, -0x1.270488p-18f, -0x1.4ea52p-20f,
     -0x1.404c76p-24f, -0x1.19f77p-25f, 0.0f, 0x1.7908eep-5f, 0x1.6d353cp-7f, -0x1.ca2c86p-6f, -0x1.02915ep-5f},
    {-0x1.bfcc04p-6f, -0x1.db563p-7f, -0x1.a1944ep-10f, 0x1.c004dp-11f, 0x1.b343fp-12f, 0x1.ca7144p-15f,
     0x1.b88ad2p-17f, -0x1.7eccdep-19f, -0x1.513eb6p-22f, -0x1.069c16p-29f, -0x1.8755aap-37f, 0.0f, 0x1.462a5ap-4f,
     0x1.aa1594p-5f, 0x1.7cdd7ep-7f, -0x1.ad922p-7f, -0x1.3c01ccp-6f, -0x1.45feeap-7f, -0x1.d35054p-9f,
     -0x1.040e4cp-10f, 0x1.dac874p-15f, 0x1.44b9bp-13f, 0x1.43278ep-14f, 0x1.f40f22p-16f, 0x1.2ff73ap-20f,
     0x1.a639a8p-19f, 0x1.3b4b7ap-19f, 0.0f, 0x1.3704e4p-5f, 0x1.7437dcp-4f, 0x1.2a97a8p-4f, 0x1.1e6a68p-6f},
    {0x1.39f28p-4f, 0x1.cc2ae6p-7f, -0x1.10b4c8p-8f, -0x1.fedbdep-9f, -0x1.23e128p-10f, -0x1.0a7f02p-13f,
     -0x1.941ff8p-17f, -0x1.1a7756p-20f, -0x1.a52d7ap-26f, -0x1.537f9ap-33f, -0x1.04b01cp-40f, 0.0f, -0x1.0511a8p-5f,
     0x1.e9215cp-5f, 0x1.9f433ap-4f, 0x1.91e5bcp-4f, 0x1.f6dap-5f, 0x1.66798ap-6f, 0x1.456d4ap-8f, -0x1.1cf374p-11f,
     -0x1.dc7246p-10f, -0x1.0e9354p-10f, -0x1.b5f5fcp-12f, -0x1.373f54p-13f, -0x1.ce1592p-16f, -0x1.661468p-19f,
     -0x1.72b12p-23f, 0.0f, -0x1.5f0b52p-3f, -0x1.42cb32p-4f, 0x1.361f8cp-5f, 0x1.941a8ap-4f},
    {-0x1.1f2836p-4f, 0x1.cac422p-7f, 0x1.298646p-6f, 0x1.2988b4p-7f, 0x1.109cc6p-9f, 0x1.c735c2p-13f, 0x1.36fde2p-16f,
     0x1.2f684ep-19f, 0x1.16c53ap-22f, 0x1.b47858p-30f, 0x1.4651e8p-37f, 0.0f, -0x1.ab3728p-2f, -0x1.99bb36p-2f,
     -0x1.429a3ap-2f, -0x1.b349c4p-3f, -0x1.76de98p-4f, -0x1.9c97cap-7f, 0x1.764edcp-7f, 0x1.e23cap-7f, 0x1.4d5cfp-7f,
     0x1.1c3ccap-8f, 0x1.9dea4ap-10f, 0x1.1673bep-11f, 0x1.9dc796p-14f, 0x1.d52492p-18f, -0x1.b17e1p-21f, 0.0f,
     -0x1.1a4836p-3f, -0x1.136232p-2f, -0x1.2637b4p-2f, -0x1.b3cb0ap-3f},
    {-0x1.09636ep-5f, -0x1.c77bb4p-5f, -0x1.eff036p-6f, -0x1.908586p-7f, -0x1.44a3c2p-9f, -0x1.fd3722p-13f,
     -0x1.69e994p-16f, -0x1.e7a30ep-20f, -0x1.6909ap-25f, -0x1.1cbf84p-32f, -0x1.ab5fcap-40f, 0.0f, -0x1.664572p-3f,
     -0x1.cf6136p-2f, -0x1.62eb66p-1f, -0x1.bcda34p-1f, -0x1.042456p+0f, -0x1.13a8a8p+0f, -0x1.12e8bp+0f,
     -0x1.0e2412p+0f, -0x1.079ed8p+0f, -0x1.02dafp+0f, -0x1.00f9c6p+0f, -0x1.0050e6p+0f, -0x1.000ep+0f,
     -0x1.000142p+0f, -0x1.00001cp+0f, -1.0f, 0x1.37bc7cp-1f, 0x1.df4976p-2f, 0x1.1ab48cp-2f, 0x1.b233a4p-4f},
    {0x1.15dd82p+0f, 0x1.0cc9a8p+0f, 0x1.05677p+0f, 0x1.01f434p+0f, 0x1.005ddp+0f, 0x1.0008cap+0f, 0x1.0000c4p+0f,
     0x1.00001p+0f, 1.0f, 1.0f, 1.0f, 1.0f, 0x1.2a1932p-1f, 0x1.e8c59ap-2f, 0x1.239da8p-2f, 0x1.713e1cp-6f,
     -0x1.d0a78cp-2f, -0x1.283f24p+0f, -0x1.e03242p+0f, -0x1.4af8p+1f, -0x1.d05214p+1f, -0x1.3f2276p+2f,
     -0x1.950d1ep+2f, -0x1.ea9234p+2f, -0x1.355686p+3f, -0x1.8aa75ep+3f, -0x1.dff9bcp+3f, -17.0f, 0x1.68b2eep-1f,
     0x1.c5d962p-1f, 0x1.02c212p+0f, 0x1.12b326p+0f},
};

}  // namespace og

#else
#define OG_TABLES 0
#endif

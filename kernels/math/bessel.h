#pragma once
#include "config.h"
#include "math/arith.h"
#include "math/exp.h"

// Modified Bessel functions of the first kind, I0 and I1, and e^-|x| times them, as in torch.special and scipy. Up to
// 8, the power series, whose terms have one sign; above, Chebyshev series of sqrt(x) e^-x I(x) in 32 / x - 2, after
// Cephes (Moshier 1984), own coefficients (mpmath), to 2^-58 of the first. Computed in double; float rounds once.

namespace og {

/// Clenshaw's recurrence for a Chebyshev series in u / 2, from its last coefficient down.
struct clenshaw {
  double b2, b1, b0;
  OG_FN clenshaw next(double u, double coefficient) const { return {b1, b0, fma(u, b0, coefficient - b1)}; }
  OG_FN double sum() const { return 0.5 * (b0 - b2); }
};

/// I0(x) over z = x^2 / 4 <= 16 (Abramowitz and Stegun 9.6.12).
OG_FN double bessel_i0_near(double z) {
  double p = 0x1.1159d2b18fe1fp-149;
  p = fma(p, z, 0x1.1a6d4e307528fp-140);
  p = fma(p, z, 0x1.0afb53e9cec0bp-131);
  p = fma(p, z, 0x1.cbeaf38dc529fp-123);
  p = fma(p, z, 0x1.674f8e46c208cp-114);
  p = fma(p, z, 0x1.faaf2fa1c79e5p-106);
  p = fma(p, z, 0x1.40a2dc2460523p-97);
  p = fma(p, z, 0x1.69f7da8510bcdp-89);
  p = fma(p, z, 0x1.69f7da8510bcdp-81);
  p = fma(p, z, 0x1.3e22d70ef3b5fp-73);
  p = fma(p, z, 0x1.e725594ee52e9p-66);
  p = fma(p, z, 0x1.4197a7f5154bcp-58);
  p = fma(p, z, 0x1.69ca9cf3b7f54p-51);
  p = fma(p, z, 0x1.5601885e63e5dp-44);
  p = fma(p, z, 0x1.0b313289be0b9p-37);
  p = fma(p, z, 0x1.522a43f65486ap-31);
  p = fma(p, z, 0x1.522a43f65486ap-25);
  p = fma(p, z, 0x1.02e85c0898b71p-19);
  p = fma(p, z, 0x1.23456789abcdfp-14);
  p = fma(p, z, 0x1.c71c71c71c71cp-10);
  p = fma(p, z, 0x1.c71c71c71c71cp-6);
  p = fma(p, z, 0x1p-2);
  p = fma(p, z, 0x1p+0);
  return fma(p, z, 1.0);
}
/// I1(x) / (x / 2) (Abramowitz and Stegun 9.6.10).
OG_FN double bessel_i1_near(double z) {
  double p = 0x1.88f11edf3ed4cp-145;
  p = fma(p, z, 0x1.84564b82a1184p-136);
  p = fma(p, z, 0x1.5e69de22df5cep-127);
  p = fma(p, z, 0x1.1f72d8389b3a3p-118);
  p = fma(p, z, 0x1.aaae78f4066a6p-110);
  p = fma(p, z, 0x1.1d028acb00491p-101);
  p = fma(p, z, 0x1.54ad09e6a6575p-93);
  p = fma(p, z, 0x1.69f7da8510bcdp-85);
  p = fma(p, z, 0x1.53585cdcbfb1p-77);
  p = fma(p, z, 0x1.165e7c2d153f3p-69);
  p = fma(p, z, 0x1.8bce58901a35ep-62);
  p = fma(p, z, 0x1.e2637bef9ff1ap-55);
  p = fma(p, z, 0x1.f17697cf1cf13p-48);
  p = fma(p, z, 0x1.ab81ea75fcdf4p-41);
  p = fma(p, z, 0x1.2c9758daf5cdp-34);
  p = fma(p, z, 0x1.522a43f65486ap-28);
  p = fma(p, z, 0x1.27e4fb7789f5cp-22);
  p = fma(p, z, 0x1.845c8a0ce5129p-17);
  p = fma(p, z, 0x1.6c16c16c16c17p-12);
  p = fma(p, z, 0x1.c71c71c71c71cp-8);
  p = fma(p, z, 0x1.5555555555555p-4);
  p = fma(p, z, 0x1p-1);
  return fma(p, z, 1.0);
}
/// sqrt(x) e^-x I0(x) over 32 / x - 2 for x >= 8, and the same of I1.
OG_FN double bessel_i0_far(double u) {
  clenshaw s = {0, 0, -0x1.0adb754ca8b19p-57};
  s = s.next(u, -0x1.646da6611913p-58);
  s = s.next(u, 0x1.9be1812d98421p-55);
  s = s.next(u, 0x1.3f3dd076041cdp-55);
  s = s.next(u, -0x1.4600babd21fe4p-52);
  s = s.next(u, -0x1.8aee7d908de38p-52);
  s = s.next(u, 0x1.fee7da3eafb1fp-50);
  s = s.next(u, 0x1.12a919094e6d7p-48);
  s = s.next(u, -0x1.583fe7e65629ap-47);
  s = s.next(u, -0x1.75d99cf68bb32p-45);
  s = s.next(u, 0x1.156ff0d5fc545p-46);
  s = s.next(u, 0x1.b1c8c6b83c073p-42);
  s = s.next(u, 0x1.94347fa268cecp-41);
  s = s.next(u, -0x1.f904303178d66p-40);
  s = s.next(u, -0x1.d0fd7357e7bf2p-37);
  s = s.next(u, -0x1.1511d08397425p-35);
  s = s.next(u, 0x1.a24feabe8004fp-37);
  s = s.next(u, 0x1.0f9ccc0f46f75p-31);
  s = s.next(u, 0x1.d2c64a9225b87p-29);
  s = s.next(u, 0x1.8569280d6d56dp-26);
  s = s.next(u, 0x1.b8007d9cd616ep-23);
  s = s.next(u, 0x1.8412bc101c586p-19);
  s = s.next(u, 0x1.20fa378999e52p-14);
  s = s.next(u, 0x1.b998ca2e59049p-9);
  s = s.next(u, 0x1.9be62aca809cbp-1);
  return s.sum();
}
OG_FN double bessel_i1_far(double u) {
  clenshaw s = {0, 0, 0x1.1556db352e8e6p-57};
  s = s.next(u, 0x1.45b8aea87b95p-58);
  s = s.next(u, -0x1.acea3b2532277p-55);
  s = s.next(u, -0x1.2806c9c77332p-55);
  s = s.next(u, 0x1.55915fceb588ap-52);
  s = s.next(u, 0x1.7d68e5f04a2d1p-52);
  s = s.next(u, -0x1.0efcd8bc4d22ap-49);
  s = s.next(u, -0x1.12db5138afbc7p-48);
  s = s.next(u, 0x1.776e1762d31e8p-47);
  s = s.next(u, 0x1.80d3c26b3281ep-45);
  s = s.next(u, -0x1.7a9482e6d22ap-46);
  s = s.next(u, -0x1.cbc458e73e255p-42);
  s = s.next(u, -0x1.953e1076ab493p-41);
  s = s.next(u, 0x1.1e7d3f6439fa3p-39);
  s = s.next(u, 0x1.f101f653c457bp-37);
  s = s.next(u, 0x1.1e1a1f1587865p-35);
  s = s.next(u, -0x1.4dcf9d4504c0cp-36);
  s = s.next(u, -0x1.334ca5423dd8p-31);
  s = s.next(u, -0x1.0790b9ad53528p-28);
  s = s.next(u, -0x1.c415394bb46c1p-26);
  s = s.next(u, -0x1.0dbfd2e9e5443p-22);
  s = s.next(u, -0x1.048df49ca0373p-18);
  s = s.next(u, -0x1.cfd7f804aa9a6p-14);
  s = s.next(u, -0x1.3fda053fcdb4cp-7);
  s = s.next(u, 0x1.8ea18b55b1514p-1);
  return s.sum();
}

/// (x + 2)^(3/2) e^-x (I0(x) - I1(x)) over x / 2 - 2 for x <= 8; the power keeps its magnitude nearly constant.
OG_FN double bessel_gap_near(double u) {
  clenshaw s = {0, 0, 0x1.06a911060180ep-57};
  s = s.next(u, -0x1.798db36831368p-56);
  s = s.next(u, 0x1.106e17c27fee2p-54);
  s = s.next(u, -0x1.8adf39e3814a3p-53);
  s = s.next(u, 0x1.1f8f1ca08fda6p-51);
  s = s.next(u, -0x1.a516e4d0fb5bap-50);
  s = s.next(u, 0x1.36336bd21b17fp-48);
  s = s.next(u, -0x1.cc3b14702bd7p-47);
  s = s.next(u, 0x1.5830e0271ea11p-45);
  s = s.next(u, -0x1.03dff9f2494c7p-43);
  s = s.next(u, 0x1.8ce422f13c7d8p-42);
  s = s.next(u, -0x1.332836be952dep-40);
  s = s.next(u, 0x1.e2d9061197e92p-39);
  s = s.next(u, -0x1.820c6cbcb19fap-37);
  s = s.next(u, 0x1.39fad68c3398cp-35);
  s = s.next(u, -0x1.030ea16753f61p-33);
  s = s.next(u, 0x1.aec23c96c0b14p-32);
  s = s.next(u, -0x1.64bfc388c066cp-30);
  s = s.next(u, 0x1.2164c7172faecp-28);
  s = s.next(u, -0x1.c121d56b5bba6p-27);
  s = s.next(u, 0x1.41bfb960af2b4p-25);
  s = s.next(u, -0x1.8e515d829a7e2p-24);
  s = s.next(u, 0x1.600fafbe14a53p-23);
  s = s.next(u, 0x1.9b29dcfbf1408p-26);
  s = s.next(u, -0x1.0d1125842d04ep-19);
  s = s.next(u, 0x1.93a4187a59febp-17);
  s = s.next(u, -0x1.a9b286e4f54b8p-15);
  s = s.next(u, 0x1.6c812ef1eaedep-13);
  s = s.next(u, -0x1.043ae7742abf9p-11);
  s = s.next(u, 0x1.2ed6f2a5df064p-10);
  s = s.next(u, -0x1.02ae9033cd6ap-9);
  s = s.next(u, 0x1.4fc4c986c7597p-10);
  s = s.next(u, 0x1.c3a4121a65d0cp-8);
  s = s.next(u, -0x1.3252069544038p-5);
  s = s.next(u, 0x1.e2b2c4560e44p-4);
  s = s.next(u, -0x1.23f8c4abfa023p-2);
  s = s.next(u, 0x1.2212cc81b52f7p-1);
  s = s.next(u, -0x1.e51689b1294d4p-1);
  s = s.next(u, 0x1.bea16736c2bcep+0);
  return s.sum();
}
/// x^(3/2) e^-x (I0(x) - I1(x)) over 32 / x - 2 for x >= 8.
OG_FN double bessel_gap_far(double u) {
  clenshaw s = {0, 0, 0x1.852ea03431fd2p-59};
  s = s.next(u, -0x1.3614263caa07bp-60);
  s = s.next(u, -0x1.e7ec994fdde26p-57);
  s = s.next(u, 0x1.b3c40a56842ecp-57);
  s = s.next(u, 0x1.378427d18ec3p-54);
  s = s.next(u, -0x1.89a291a30a771p-54);
  s = s.next(u, -0x1.a94211a4b5b52p-52);
  s = s.next(u, 0x1.2fecce96b1dap-51);
  s = s.next(u, 0x1.4197b912a2fe6p-49);
  s = s.next(u, -0x1.9b8858ac36cbep-49);
  s = s.next(u, -0x1.0f19ee3d32704p-46);
  s = s.next(u, 0x1.9af26b9eff638p-47);
  s = s.next(u, 0x1.eb7aa68331bedp-44);
  s = s.next(u, 0x1.02d4e826e3a71p-46);
  s = s.next(u, -0x1.b573a2f769166p-41);
  s = s.next(u, -0x1.4545100af0ad4p-40);
  s = s.next(u, 0x1.2b518adbff493p-38);
  s = s.next(u, 0x1.3d721b626c7c8p-36);
  s = s.next(u, 0x1.8ee7da74ed32dp-38);
  s = s.next(u, -0x1.4e1c6cd217957p-33);
  s = s.next(u, -0x1.3d0f4e21b41b1p-31);
  s = s.next(u, -0x1.98b227ba4f75ap-31);
  s = s.next(u, 0x1.a35acc0ea5f26p-29);
  s = s.next(u, 0x1.e6d84f8badce6p-26);
  s = s.next(u, 0x1.70b05fe340235p-23);
  s = s.next(u, 0x1.40f7b77592216p-20);
  s = s.next(u, 0x1.93bf625b5ec6cp-17);
  s = s.next(u, 0x1.919d76ea57664p-13);
  s = s.next(u, 0x1.5e8560a74f19fp-8);
  s = s.next(u, 0x1.a319d9174c322p-2);
  return s.sum();
}

/// A function from its values on both sides of 8, which are multiplied by e^a or by e^-a.
struct bessel {
  double near, far, a;  // I(x) up to 8, e^-a I(x) above
  OG_FN double plain() const {
    double n;
    const double t = exp_reduce(at_most(a, 720.0), n);  // in two steps: e^a overflows before I0 and I1 do
    const double y = a > 720 ? infinity<double>() : scale_twice(fma(far, t, far), n);
    return a <= 8 ? near : y;
  }
  OG_FN double scaled() const { return a <= 8 ? near * exp(-a) : far; }
};
OG_FN bessel bessel_i0(double x) {
  const double a = abs(x), low = at_most(a, 8.0), high = choose(a > 8, a, 8.0);
  return {bessel_i0_near(0.25 * low * low), divide(bessel_i0_far(divide(32.0, high) - 2), sqrt(high)), a};
}
OG_FN bessel bessel_i1(double x) {
  const double a = abs(x), low = at_most(a, 8.0), high = choose(a > 8, a, 8.0);
  const double near = 0.5 * low * bessel_i1_near(0.25 * low * low);
  return {near, divide(bessel_i1_far(divide(32.0, high) - 2), sqrt(high)), a};
}

OG_FN double i0(double x) { return keep_nan(x, bessel_i0(x).plain()); }
OG_FN double i1(double x) { return keep_nan(x, copysign(bessel_i1(x).plain(), x)); }
/// e^-|x| I0(x).
OG_FN double i0e(double x) { return keep_nan(x, bessel_i0(x).scaled()); }
/// e^-|x| I1(x).
OG_FN double i1e(double x) { return keep_nan(x, copysign(bessel_i1(x).scaled(), x)); }
/// The derivative of i0e: i1e(x) - sign(x) i0e(x), where the two differ only in their last digits.
OG_FN double i0e_slope(double x) {
  const double a = abs(x), low = at_most(a, 8.0), high = choose(a > 8, a, 8.0);
  const double base = choose(a > 8, high, low + 2);
  const double shape = a > 8 ? bessel_gap_far(divide(32.0, high) - 2) : bessel_gap_near(fma(0.5, low, -2.0));
  const double y = divide(divide(shape, base), sqrt(base));
  return x == 0 ? x : keep_nan(x, copysign(y, -x));
}

OG_FN float i0e_slope(float x) { return (float)i0e_slope((double)x); }
OG_FN float i0e(float x) { return (float)i0e((double)x); }
OG_FN float i1e(float x) { return (float)i1e((double)x); }
OG_FN float i0(float x) { return (float)i0((double)x); }
OG_FN float i1(float x) { return (float)i1((double)x); }

}  // namespace og

#pragma once
#include "config.h"
#include "math/log.h"

// lgamma, digamma and trigamma, as in torch.special and scipy. Computed in double; float rounds the double result once
// and is therefore right near the zeros too. Recurrences move the argument to where a polynomial or the asymptotic
// series holds; negative arguments are reflected. Fixed trip counts and selects only.

namespace og {

// sin(pi x) and cos(pi x): x minus its nearest half integer is exact, then |f| <= 1/4; own fits, error 2^-53 and 2^-61.
struct turn64 {
  double sine, cosine;
};
OG_FN turn64 sin_cos_pi(double any) {
  const double x = abs(any) < 0x1p53 ? any : any - any;  // even integers from there on, and infinity gives NaN
  const double n = rint(2 * x);
  const double f = fma(n, -0.5, x);
  const double z = f * f;
  double s = 0x1.e350b34aa029fp-12;
  s = fma(s, z, -0x1.e2fe610ff7e85p-8);
  s = fma(s, z, 0x1.50782d4619d9dp-4);
  s = fma(s, z, -0x1.32d2ccdfcf026p-1);
  s = fma(s, z, 0x1.466bc67754e73p+1);
  s = fma(s, z, -0x1.4abbce625be08p+2);
  s = fma(s * z, f, f * 0x1.921fb54442d18p+1);
  double c = -0x1.b14c21f293dp-14;
  c = fma(c, z, 0x1.f9c842e6c60bep-10);
  c = fma(c, z, -0x1.a6d1e6b740623p-6);
  c = fma(c, z, 0x1.e1f5067b07388p-3);
  c = fma(c, z, -0x1.55d3c7e3c2d83p+0);
  c = fma(c, z, 0x1.03c1f081b5a65p+2);
  c = fma(c, z, -0x1.3bd3cc9be45dep+2);
  c = fma(c, z, 1.0);
  const double quadrant = n - 4 * floor(n * 0.25);
  const bool odd = quadrant == 1 || quadrant == 3;
  const double sine = odd ? c : s, cosine = odd ? s : c;
  return {quadrant >= 2 ? -sine : sine, quadrant == 1 || quadrant == 2 ? -cosine : cosine};
}

/// lgamma(2 + d) = d P(d) for |d| <= 1/2, own fit, error 2^-57.4: relatively exact at the zero at 2.
OG_FN double lgamma_near_two(double d) {
  double p = -0x1.f721a794374a6p-24;
  p = fma(p, d, 0x1.2d37f1cc9a6d7p-22);
  p = fma(p, d, -0x1.e3d835396871cp-22);
  p = fma(p, d, 0x1.ece0df7a6aba8p-21);
  p = fma(p, d, -0x1.111921860b52p-19);
  p = fma(p, d, 0x1.26508728759a9p-18);
  p = fma(p, d, -0x1.3ccbc95a62593p-17);
  p = fma(p, d, 0x1.5805da5255d67p-16);
  p = fma(p, d, -0x1.78dd9f1fd41ccp-15);
  p = fma(p, d, 0x1.a127e64860bd9p-14);
  p = fma(p, d, -0x1.d3fd519ff31ffp-13);
  p = fma(p, d, 0x1.0b36af1b7d7eap-11);
  p = fma(p, d, -0x1.38ac5c21b5a45p-10);
  p = fma(p, d, 0x1.7add6eaea5273p-9);
  p = fma(p, d, -0x1.e404fc21a5134p-8);
  p = fma(p, d, 0x1.51322ac7d7c7fp-6);
  p = fma(p, d, -0x1.13e001a5575b4p-4);
  p = fma(p, d, 0x1.4a34cc4a60fa7p-2);
  return d * fma(p, d, 0x1.b0ee6072093cep-2);
}

/// x > 0. Below 1/2 and 3/2 by lgamma(x) = lgamma(x + 1) - log x; to 10 by stepping down, collecting the product; above
/// by Stirling's series (Abramowitz and Stegun 6.1.41), whose first omitted term is below 2^-57 there.
OG_FN double lgamma_positive(double x) {
  double product = 1;
  double y = x;
  for (int i = 0; i < 8; i++) {
    const bool step = y > 2.5;
    y = step ? y - 1 : y;
    product = step ? product * y : product;
  }
  const bool one = x < 1.5, two = x < 0.5;
  const double below = two ? x * (x + 1) : x;
  const double d = two ? x : (one ? x - 1 : y - 2);
  const double small = lgamma_near_two(d) + (one ? -log(below) : log(product));

  const double r = divide(1.0, x), z = r * r;
  double s = -3617.0 / 122400;  // B_2k / (2k (2k - 1))
  s = fma(s, z, 1.0 / 156);
  s = fma(s, z, -691.0 / 360360);
  s = fma(s, z, 1.0 / 1188);
  s = fma(s, z, -1.0 / 1680);
  s = fma(s, z, 1.0 / 1260);
  s = fma(s, z, -1.0 / 360);
  s = fma(s, z, 1.0 / 12);
  const double l = log(x);
  const double large = fma(x - 0.5, l, -x) + (0x1.d67f1c864beb5p-1 + s * r);
  const double huge = x < 0x1p60 ? large : x * (l - 1);
  return x < 10 ? small : huge;
}

/// log|Gamma(x)|. Poles at 0, -1, -2, ... and both infinities give +inf.
OG_FN double lgamma(double x) {
  const double a = abs(x);
  const double positive = lgamma_positive(a);
  // Gamma(-a) Gamma(a) = -pi / (a sin(pi a))
  const double reflected = log(divide(0x1.921fb54442d18p+1, abs(a * sin_cos_pi(a).sine))) - positive;
  const bool pole = x <= 0 && floor(x) == x;
  const double finite = x < -0x1p-60 ? reflected : positive;  // -log a from both sides of 0, where a sin(pi a) underflows
  const double y = pole || a == infinity<double>() ? infinity<double>() : finite;
  return x != x ? x : y;
}

/// psi(x): the recurrence sum 1/x + 1/(x+1) + ... as one fraction, then the series of Abramowitz and Stegun 6.3.18. NaN at
/// negative integers and -inf, -inf at +0.0, +inf at -0.0, as torch.digamma and scipy.
OG_FN double digamma(double x) {
  const bool reflect = x < 0;
  double y = reflect ? 1 - x : x;
  double product = 1, derivative = 0;
  for (int i = 0; i < 8; i++) {
    const bool step = y < 8;
    derivative = step ? fma(derivative, y, product) : derivative;
    product = step ? product * y : product;
    y = step ? y + 1 : y;
  }
  const double r = divide(1.0, y), z = r * r;
  double s = 43867.0 / 14364;
  s = fma(s, z, -3617.0 / 8160);
  s = fma(s, z, 1.0 / 12);
  s = fma(s, z, -691.0 / 32760);
  s = fma(s, z, 1.0 / 132);
  s = fma(s, z, -1.0 / 240);
  s = fma(s, z, 1.0 / 252);
  s = fma(s, z, -1.0 / 120);
  s = fma(s, z, 1.0 / 12);
  const double psi = log(y) - fma(0.5, r, s * z) - divide(derivative, product);
  const turn64 t = sin_cos_pi(x);
  const double reflected = psi - divide(0x1.921fb54442d18p+1 * t.cosine, t.sine);
  const double negative = floor(x) == x ? quiet_nan<double>() : reflected;
  const double finite = reflect ? negative : psi;
  return x == 0 ? copysign(infinity<double>(), -x) : finite;
}

/// psi'(x): recurrence to 12, Abramowitz and Stegun 6.4.12, reflection pi^2 / sin^2(pi x) - psi'(1 - x); +inf at the poles.
OG_FN double trigamma(double x) {
  const bool reflect = x < 0.5;
  double y = reflect ? 1 - x : x;
  double sum = 0;
  for (int i = 0; i < 12; i++) {
    const bool step = y < 12;
    sum = step ? sum + divide(1.0, y * y) : sum;
    y = step ? y + 1 : y;
  }
  const double r = divide(1.0, y), z = r * r;
  double s = -3617.0 / 510;
  s = fma(s, z, 7.0 / 6);
  s = fma(s, z, -691.0 / 2730);
  s = fma(s, z, 5.0 / 66);
  s = fma(s, z, -1.0 / 30);
  s = fma(s, z, 1.0 / 42);
  s = fma(s, z, -1.0 / 30);
  s = fma(s, z, 1.0 / 6);
  const double psi = sum + (r + fma(0.5, z, s * z * r));
  const double p = divide(0x1.921fb54442d18p+1, sin_cos_pi(x).sine);
  return reflect ? fma(p, p, -psi) : psi;
}

OG_FN float lgamma(float x) { return (float)lgamma((double)x); }
OG_FN float digamma(float x) { return (float)digamma((double)x); }
OG_FN float trigamma(float x) { return (float)trigamma((double)x); }

}  // namespace og

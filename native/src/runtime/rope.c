#include "runtime/rope.h"

/* pi/2 in three parts; the first two have so few bits that their products with the quarter turns
 * below 2^26 are exact. */
static const double half_pi_1 = 0x1.921fb4p+0;
static const double half_pi_2 = 0x1.4442dp-24;
static const double half_pi_3 = 0x1.8469898cc5170p-48;
static const double two_over_pi = 0x1.45f306dc9c883p-1;

void elm_rope_table(uint32_t position, const float* inv_freq, size_t n, float* cosine,
                    float* sine) {
  for (size_t i = 0; i < n; ++i) {
    const double angle = (double)position * (double)inv_freq[i];
    /* Adding and subtracting 1.5 * 2^52 rounds to the nearest integer. */
    const double turns = (angle * two_over_pi + 0x1.8p52) - 0x1.8p52;
    const double r = ((angle - turns * half_pi_1) - turns * half_pi_2) - turns * half_pi_3;
    const double s = r * r;
    /* Taylor, |r| <= pi/4: the error is below 1e-14. */
    const double sin_r =
        r *
        (1.0 + s * (-1.0 / 6 +
                    s * (1.0 / 120 +
                         s * (-1.0 / 5040 + s * (1.0 / 362880 + s * (-1.0 / 39916800 +
                                                                     s * (1.0 / 6227020800.0)))))));
    const double cos_r =
        1.0 + s * (-0.5 + s * (1.0 / 24 +
                               s * (-1.0 / 720 +
                                    s * (1.0 / 40320 + s * (-1.0 / 3628800 +
                                                            s * (1.0 / 479001600.0 +
                                                                 s * (-1.0 / 87178291200.0)))))));
    switch ((unsigned)(long long)turns & 3) {
      case 0:
        cosine[i] = (float)cos_r;
        sine[i] = (float)sin_r;
        break;
      case 1:
        cosine[i] = (float)-sin_r;
        sine[i] = (float)cos_r;
        break;
      case 2:
        cosine[i] = (float)-cos_r;
        sine[i] = (float)-sin_r;
        break;
      default:
        cosine[i] = (float)sin_r;
        sine[i] = (float)-cos_r;
        break;
    }
  }
}

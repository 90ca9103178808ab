#include "kernels/quantize/e4_fit.h"

#include <float.h>
#include <string.h>

enum {
  GROUP = ELM_GROUP_COLS,
  MAX_SCALE = 15,
  MAX_CODE = 15,
  MAX_BRACKET = 127,  /* of s q - z, which is an int8 */
  MAX_OFFSET = 128,
  NUM_RATIOS = 14
};

/* A group's s and z with their squared error, in units of D^2. */
typedef struct group_fit {
  float error;
  int scale;
  int offset;
} group_fit;

typedef struct group_range {
  float low; /* at most 0, because z is not negative */
  float high;
} group_range;

/* The code nearest to x. Adding 1.5 * 2^23 rounds to an integer; |x| < 2^22. */
static inline int nearest_code(float x) {
  const float magic = 12582912.0F;
  const float shifted = x + magic;
  int32_t code;
  memcpy(&code, &shifted, sizeof code);
  code -= 0x4b400000;
  code = code < 0 ? 0 : code;
  return code > MAX_CODE ? MAX_CODE : code;
}

static int nearest_int(float x) { return (int)(x < 0.0F ? x - 0.5F : x + 0.5F); }

/* Sum of 32 numbers, by halves: the order is fixed, and the halves are vectors. */
static inline float sum_group(float x[GROUP]) {
  for (int half = GROUP / 2; half >= 4; half /= 2) {
    for (int i = 0; i < half; ++i) {
      x[i] += x[i + half];
    }
  }
  return (x[0] + x[2]) + (x[1] + x[3]);
}

/* Squared error of the group `u` (weights over D) with this s and z, and the sum of the errors. */
static float group_error(const float* restrict u, int scale, int offset, float* sum) {
  float errors[GROUP];
  float squares[GROUP];
  const float s = (float)scale;
  const float z = (float)offset;
  const float inverse = 1.0F / s;
  for (int i = 0; i < GROUP; ++i) {
    const float code = (float)nearest_code((u[i] + z) * inverse);
    const float error = (s * code - z) - u[i];
    errors[i] = error;
    squares[i] = error * error;
  }
  *sum = sum_group(errors);
  return sum_group(squares);
}

static int clamp_offset(int offset, int scale) {
  const int least = MAX_CODE * scale - MAX_BRACKET > 0 ? MAX_CODE * scale - MAX_BRACKET : 0;
  return offset < least ? least : offset > MAX_OFFSET ? MAX_OFFSET : offset;
}

static void fit_offset(const float* u, int scale, int offset, group_fit* best) {
  for (int step = 0; step < 3; ++step) {
    float sum;
    const float error = group_error(u, scale, offset, &sum);
    const int next = clamp_offset(offset + nearest_int(sum * (1.0F / GROUP)), scale);
    if (error < best->error) {
      *best = (group_fit){error, scale, offset};
    }
    if (next == offset) {
      break;
    }
    offset = next;
  }
}

static group_fit fit_group(const float* u, group_range range, float inverse_d) {
  const float low = range.low * inverse_d;
  const float width = range.high * inverse_d - low;
  group_fit best = {FLT_MAX, 1, 0};
  int widest = (int)(width * (1.0F / MAX_CODE)) + 1;
  int narrowest;
  widest = widest > MAX_SCALE ? MAX_SCALE : widest;
  narrowest = (widest * 11 + 8) / 16;
  narrowest = narrowest < 1 ? 1 : narrowest;
  for (int scale = widest; scale >= narrowest; --scale) {
    const float margin = 0.5F * ((float)(MAX_CODE * scale) - width);
    fit_offset(u, scale, clamp_offset(nearest_int(margin - low), scale), &best);
  }
  return best;
}

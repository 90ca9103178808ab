#include "kernels/quantize/grouped_fit.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

/* The error of a group as a function of (s, z) has many local minima of nearly the same depth:
 * which grid happens to pass close to the 32 weights. So the search tries them all around the
 * obvious choice; refining one start by least squares leaves 7 % more squared error on real
 * weights. */

enum {
  MAX_BRACKET = 127, /* of s q - z, which is an int8 */
  MAX_OFFSET = 128,
  LANES = 16 /* candidates (s, z) measured at once */
};

/* D is tried from here on, as a multiple of the least D that cuts nothing off. */
#define LEAST_RATIO 0.97F

/* What differs between the formats. The coarse s of E5 wants more trials of D and, always, a
 * narrower s: 2 to 5 % less squared error in the time that E4 takes. */
typedef struct fit_grid {
  int most_code;
  int most_scale;
  int least_narrower; /* s goes down by at least this much */
  int num_trials;     /* of D */
  float ratio_step;   /* from one to the next */
} fit_grid;
static const fit_grid e4_grid = {15, 15, 0, 6, 0.02F};
static const fit_grid e5_grid = {31, 8, 1, 12, 0.03F};

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

typedef struct candidates {
  int count;
  int scale[LANES];
  int offset[LANES];
} candidates;

/* The code nearest to x, |x| < 2^21. Adding 1.5 * 2^23 rounds to an integer, and the clamp to
 * 0..most is exact on integers; without comparisons, so that loops become vector code. */
static inline float nearest_code(float x, float most) {
  const float magic = 12582912.0F;
  const float integer = (x + magic) - magic;
  return ((fabsf(integer) - fabsf(integer - most)) + most) * 0.5F;
}

static inline float squared_distance(float x, float most) {
  const float distance = nearest_code(x, most) - x;
  return distance * distance;
}

static int nearest_int(float x) { return (int)(x < 0.0F ? x - 0.5F : x + 0.5F); }

static int clamp_int(int value, int least, int most) {
  return value < least ? least : value > most ? most : value;
}

/* Measures all candidates on the group `u` (weights over D) and empties the list. */
static void measure(float most, const float* u, const float* importance, candidates* list,
                    group_fit* best) {
  float inverse[LANES];
  float shift[LANES];
  float errors[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    const int i = lane < list->count ? lane : 0;
    inverse[lane] = 1.0F / (float)list->scale[i];
    shift[lane] = (float)list->offset[i] * inverse[lane];
    errors[lane] = 0.0F;
  }
  for (int i = 0; i < ELM_GROUP; i += 4) {
    for (int lane = 0; lane < LANES; ++lane) {
      float sum = importance[i] * squared_distance(u[i] * inverse[lane] + shift[lane], most);
      sum += importance[i + 1] * squared_distance(u[i + 1] * inverse[lane] + shift[lane], most);
      sum += importance[i + 2] * squared_distance(u[i + 2] * inverse[lane] + shift[lane], most);
      sum += importance[i + 3] * squared_distance(u[i + 3] * inverse[lane] + shift[lane], most);
      errors[lane] += sum;
    }
  }
  for (int i = 0; i < list->count; ++i) {
    const float error = errors[i] * (float)(list->scale[i] * list->scale[i]);
    if (error < best->error) {
      *best = (group_fit){error, list->scale[i], list->offset[i]};
    }
  }
  list->count = 0;
}

/* The best s and z of a group: every s from the one that covers the range down to 7/8 of it or
 * less, with every z that moves the grid by up to half a step from the middle of the range. */
static group_fit fit_group(const fit_grid* grid, const float* u, const float* importance,
                           group_range range, float inverse_d) {
  const float low = range.low * inverse_d;
  const float width = range.high * inverse_d - low;
  const int widest = clamp_int((int)(width / (float)grid->most_code) + 1, 1, grid->most_scale);
  const int most_narrow = widest - grid->least_narrower;
  const int narrowest = clamp_int((widest * 14 + 8) / 16, 1, most_narrow > 1 ? most_narrow : 1);
  group_fit best = {FLT_MAX, 1, 0};
  candidates list = {.count = 0};
  for (int scale = widest; scale >= narrowest; --scale) {
    const int least = clamp_int(grid->most_code * scale - MAX_BRACKET, 0, MAX_OFFSET);
    const int middle = nearest_int(0.5F * ((float)(grid->most_code * scale) - width) - low);
    const int half = (scale + 1) / 2;
    const int last = clamp_int(middle + half, least, MAX_OFFSET);
    for (int z = clamp_int(middle - half, least, MAX_OFFSET); z <= last; ++z) {
      list.scale[list.count] = scale;
      list.offset[list.count] = z;
      list.count += 1;
      if (list.count == LANES) {
        measure((float)grid->most_code, u, importance, &list, &best);
      }
    }
  }
  if (list.count > 0) {
    measure((float)grid->most_code, u, importance, &list, &best);
  }
  return best;
}

/* Ranges of the groups; returns the least D with which no group must be cut off. */
static float find_ranges(const fit_grid* grid, const float* weights, size_t num_groups,
                         group_range* ranges) {
  float least = 0.0F;
  for (size_t g = 0; g < num_groups; ++g) {
    const float* w = &weights[g * ELM_GROUP];
    group_range range = {0.0F, w[0]};
    for (size_t i = 0; i < ELM_GROUP; ++i) {
      range.low = w[i] < range.low ? w[i] : range.low;
      range.high = w[i] > range.high ? w[i] : range.high;
    }
    ranges[g] = range;
    least = fmaxf(least, (range.high - range.low) / (float)(grid->most_scale * grid->most_code));
    least = fmaxf(least, fmaxf(range.high / (float)MAX_BRACKET, range.low / (float)-MAX_OFFSET));
  }
  return least;
}

static bool is_zero(group_range range) { return range.low == 0.0F && range.high == 0.0F; }

/* Fits all groups with this D; the squared error, or a number above `limit` if it exceeds that. */
static double fit_groups(const fit_grid* grid, const float* weights, const float* importance,
                         const group_range* ranges, size_t num_groups, float d, double limit,
                         group_fit* fits) {
  const float inverse_d = 1.0F / d;
  const double unit = (double)d * (double)d;
  double total = 0.0;
  for (size_t g = 0; g < num_groups && total < limit; ++g) {
    float u[ELM_GROUP];
    for (size_t i = 0; i < ELM_GROUP; ++i) {
      u[i] = weights[g * ELM_GROUP + i] * inverse_d;
    }
    fits[g] = is_zero(ranges[g])
                  ? (group_fit){0.0F, 1, 0}
                  : fit_group(grid, u, &importance[g * ELM_GROUP], ranges[g], inverse_d);
    total += (double)fits[g].error * unit;
  }
  return total;
}

/* Writes D, s, z and the codes; returns the D that suits these integers best. */
static float encode(const fit_grid* grid, const float* weights, const float* importance,
                    size_t num_groups, float d, const group_fit* fits, elm_grouped_row* row) {
  const float inverse_d = 1.0F / d;
  double product = 0.0;
  double square = 0.0;
  row->d = d;
  for (size_t g = 0; g < num_groups; ++g) {
    const int scale = fits[g].scale;
    const int offset = fits[g].offset;
    const float inverse = 1.0F / (float)scale;
    const float shift = (float)offset * inverse;
    row->scale[g] = (uint8_t)scale;
    row->offset[g] = (uint8_t)offset;
    for (size_t i = 0; i < ELM_GROUP; ++i) {
      const float w = weights[g * ELM_GROUP + i];
      const int code = (int)nearest_code(w * inverse_d * inverse + shift, (float)grid->most_code);
      const double bracket = (double)(scale * code - offset);
      row->codes[g * ELM_GROUP + i] = (uint8_t)code;
      const double weighted = bracket * (double)importance[g * ELM_GROUP + i];
      product += weighted * (double)w;
      square += weighted * bracket;
    }
  }
  const float best = square > 0.0 ? (float)(product / square) : d;
  return best > 0.5F * d ? fmaxf(best, FLT_MIN) : d;
}

void elm_grouped_fit(elm_format format, const float* weights, const float* importance,
                     size_t num_groups, elm_grouped_row* out) {
  const fit_grid* grid = format == ELM_FORMAT_E4 ? &e4_grid : &e5_grid;
  group_range ranges[ELM_SUPERBLOCK_GROUPS];
  group_fit fits[ELM_SUPERBLOCK_GROUPS];
  group_fit best[ELM_SUPERBLOCK_GROUPS];
  const float least = find_ranges(grid, weights, num_groups, ranges);
  double error = DBL_MAX;
  float d = 1.0F; /* of a row of zeros */
  memset(out, 0, sizeof *out);
  for (size_t g = 0; g < ELM_SUPERBLOCK_GROUPS; ++g) {
    best[g] = (group_fit){0.0F, 1, 0};
  }
  for (int trial = 0; least > 0.0F && trial < grid->num_trials; ++trial) {
    const float next = fmaxf(least * (LEAST_RATIO + grid->ratio_step * (float)trial), FLT_MIN);
    const double next_error =
        fit_groups(grid, weights, importance, ranges, num_groups, next, error, fits);
    if (next_error < error) {
      error = next_error;
      d = next;
      memcpy(best, fits, sizeof best);
    }
  }
  const float next = encode(grid, weights, importance, num_groups, d, best, out);
  if (least > 0.0F &&
      fit_groups(grid, weights, importance, ranges, num_groups, next, error, fits) < error) {
    (void)encode(grid, weights, importance, num_groups, next, fits, out);
  }
}

#include "runtime/sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "runtime/random.h"

enum {
  LANES = 16,
  BLOCK = 128,
  DIGITS = 3,    /* of a key, in keep_top */
  BUCKETS = 4096 /* of the widest digit */
};

/* Temperatures below this are greedy: the quotient would only add rounding. */
#define MIN_TEMPERATURE 1e-6F

/* Tokens less likely than exp of this count as that likely, which is never: no Gumbel number makes
 * up for it. */
#define LEAST_SCALED (-700.0)

typedef struct sampler {
  double* histogram; /* (BUCKETS) */
  float* values;     /* (num_logits) logits after bias and penalties */
  uint32_t* ids;     /* (num_logits) candidates in rising order; before that, counts per token */
  size_t num_logits;
  size_t num_ids;
  double maximum;
  double inverse_temperature;
} sampler;

size_t elm_sampler_scratch_bytes(size_t num_logits) {
  return BUCKETS * sizeof(double) + num_logits * (sizeof(float) + sizeof(uint32_t));
}

void elm_sampling_default(elm_sampling* sampling) {
  memset(sampling, 0, sizeof *sampling);
  sampling->struct_size = (uint32_t)sizeof *sampling;
  sampling->top_p = 1.0F;
  sampling->repetition_penalty = 1.0F;
}

elm_status elm_sampling_check(const elm_sampling* sampling, size_t num_tokens, elm_error* error) {
  const elm_status invalid = ELM_STATUS_INVALID_ARGUMENT;
  if (sampling == NULL || sampling->struct_size < sizeof *sampling) {
    return elm_fail(error, invalid, "sampling is not filled: call elm_sampling_default first");
  }
  if (!(sampling->temperature >= 0.0F && sampling->temperature <= FLT_MAX)) {
    return elm_fail(error, invalid, "temperature is %g: give 0 (greedy) or a positive number",
                    (double)sampling->temperature);
  }
  if (sampling->top_k < 0) {
    return elm_fail(error, invalid, "top_k is %d: give a positive number, or 0 for off",
                    (int)sampling->top_k);
  }
  if (!(sampling->top_p > 0.0F && sampling->top_p <= 1.0F)) {
    return elm_fail(error, invalid, "top_p is %g: give a number above 0 and up to 1 (off)",
                    (double)sampling->top_p);
  }
  if (!(sampling->min_p >= 0.0F && sampling->min_p <= 1.0F)) {
    return elm_fail(error, invalid, "min_p is %g: give a number from 0 (off) to 1",
                    (double)sampling->min_p);
  }
  if (!(sampling->repetition_penalty > 0.0F && sampling->repetition_penalty <= FLT_MAX)) {
    return elm_fail(error, invalid, "repetition_penalty is %g: give a positive number, 1 for off",
                    (double)sampling->repetition_penalty);
  }
  if (!isfinite(sampling->presence_penalty)) {
    return elm_fail(error, invalid, "presence_penalty is not finite: give a number, 0 for off");
  }
  if (!isfinite(sampling->frequency_penalty)) {
    return elm_fail(error, invalid, "frequency_penalty is not finite: give a number, 0 for off");
  }
  if (sampling->num_bias != 0 && (sampling->bias_ids == NULL || sampling->bias_values == NULL)) {
    return elm_fail(error, invalid, "num_bias is %u but bias_ids or bias_values is NULL",
                    (unsigned)sampling->num_bias);
  }
  for (uint32_t i = 0; i < sampling->num_bias; ++i) {
    if (sampling->bias_ids[i] < 0 || (size_t)sampling->bias_ids[i] >= num_tokens) {
      return elm_fail(error, invalid, "logit bias names token %d: ids go from 0 to %zu",
                      (int)sampling->bias_ids[i], num_tokens - 1);
    }
    if (!(sampling->bias_values[i] <= FLT_MAX)) { /* minus infinity is fine: it bans a token */
      return elm_fail(error, invalid, "logit bias of token %d is %g: give a number or -inf",
                      (int)sampling->bias_ids[i], (double)sampling->bias_values[i]);
    }
  }
  return ELM_STATUS_OK;
}

/* Copies the logits; NaN and plus infinity are errors, minus infinity is a masked token. */
static elm_status copy_logits(sampler* s, const float* logits, elm_error* error) {
  uint32_t num_bad = 0;
  for (size_t i = 0; i < s->num_logits; ++i) {
    s->values[i] = logits[i];
    num_bad += logits[i] <= FLT_MAX ? 0U : 1U;
  }
  for (size_t i = 0; num_bad != 0 && i < s->num_logits; ++i) {
    if (!(logits[i] <= FLT_MAX)) {
      return elm_fail(error, ELM_STATUS_NONFINITE,
                      "logit of token %zu is %s (%u such logits): the model's weights or its input "
                      "are broken",
                      i, isnan(logits[i]) ? "NaN" : "infinite", (unsigned)num_bad);
    }
  }
  return ELM_STATUS_OK;
}

/* A penalty or bias must not make a logit infinite that was not. */
static float clamp_to_float(double value) {
  if (value == -INFINITY) {
    return -INFINITY;
  }
  return (float)(value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value);
}

static void apply_penalties(sampler* s, const elm_sampling* sampling, const int32_t* history,
                            size_t num_history, size_t num_generated) {
  const uint32_t done = UINT32_MAX;
  uint32_t* counts = s->ids; /* valid for the tokens of the history only */
  for (uint32_t i = 0; i < sampling->num_bias; ++i) {
    float* value = &s->values[sampling->bias_ids[i]];
    *value = clamp_to_float((double)*value + (double)sampling->bias_values[i]);
  }
  if (sampling->repetition_penalty == 1.0F && sampling->presence_penalty == 0.0F &&
      sampling->frequency_penalty == 0.0F) {
    return;
  }
  for (size_t i = 0; i < num_history; ++i) {
    counts[history[i]] = 0;
  }
  for (size_t i = num_history - num_generated; i < num_history; ++i) {
    counts[history[i]] += 1;
  }
  for (size_t i = 0; i < num_history; ++i) {
    const int32_t id = history[i];
    double value = (double)s->values[id];
    if (counts[id] == done) {
      continue;
    }
    value = value > 0.0 ? value / (double)sampling->repetition_penalty
                        : value * (double)sampling->repetition_penalty;
    if (counts[id] > 0) {
      value -= (double)sampling->presence_penalty +
               (double)sampling->frequency_penalty * (double)counts[id];
    }
    s->values[id] = clamp_to_float(value);
    counts[id] = done;
  }
}

/* The lowest id with the largest value. */
static size_t find_maximum(const sampler* s) {
  float lanes[LANES];
  float maximum = -INFINITY;
  size_t i = 0;
  for (size_t lane = 0; lane < LANES; ++lane) {
    lanes[lane] = -INFINITY;
  }
  for (; i + LANES <= s->num_logits; i += LANES) {
    for (size_t lane = 0; lane < LANES; ++lane) {
      const float value = s->values[i + lane];
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  for (; i < s->num_logits; ++i) {
    lanes[0] = s->values[i] > lanes[0] ? s->values[i] : lanes[0];
  }
  for (size_t lane = 0; lane < LANES; ++lane) {
    maximum = lanes[lane] > maximum ? lanes[lane] : maximum;
  }
  for (i = 0; s->values[i] != maximum; ++i) {
  }
  return i;
}

/* An unsigned number in the order of the floats. */
static uint32_t key_of(float value) {
  uint32_t bits;
  value += 0.0F; /* -0 and 0 are equal */
  memcpy(&bits, &value, sizeof bits);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/* Distance to the largest logit over the temperature, from LEAST_SCALED to 0. */
static double scaled(const sampler* s, uint32_t id) {
  const double x = ((double)s->values[id] - s->maximum) * s->inverse_temperature;
  return x > LEAST_SCALED ? x : LEAST_SCALED;
}

/* Sum of the unnormalised probabilities of all tokens; masked ones count as exp(LEAST_SCALED). */
static double total_mass(const sampler* s) {
  double lanes[LANES] = {0.0};
  double total = 0.0;
  for (size_t i = 0; i < s->num_logits; i += LANES) {
    const size_t count = s->num_logits - i < LANES ? s->num_logits - i : LANES;
    double x[LANES] = {0.0};
    for (size_t lane = 0; lane < count; ++lane) {
      x[lane] = scaled(s, (uint32_t)(i + lane));
    }
    for (size_t lane = 0; lane < LANES; ++lane) {
      x[lane] = elm_exp(x[lane]);
    }
    for (size_t lane = 0; lane < count; ++lane) {
      lanes[lane] += x[lane];
    }
  }
  for (size_t lane = 0; lane < LANES; ++lane) {
    total += lanes[lane];
  }
  return total;
}

/* Lists the tokens that are not masked and whose scaled logit is at least `least`. */
static void list_candidates(sampler* s, double least) {
  s->num_ids = 0;
  for (size_t i = 0; i < s->num_logits; ++i) {
    s->ids[s->num_ids] = (uint32_t)i;
    s->num_ids += s->values[i] > -INFINITY && scaled(s, (uint32_t)i) >= least ? 1 : 0;
  }
}

/* Adds the weights of the candidates whose key is `prefix` under `mask` to the histogram of the
 * digit at `shift`. The weight is 1, or the unnormalised probability. */
static void fill_histogram(sampler* s, bool by_mass, uint32_t prefix, uint32_t mask, uint32_t shift,
                           uint32_t digit_mask) {
  uint32_t digits[BLOCK];
  double weights[BLOCK];
  memset(s->histogram, 0, (digit_mask + 1) * sizeof(double));
  for (size_t j = 0; j < BLOCK; ++j) {
    weights[j] = by_mass ? 0.0 : 1.0;
  }
  for (size_t i = 0; i < s->num_ids;) {
    size_t count = 0;
    for (; i < s->num_ids && count < BLOCK; ++i) {
      const uint32_t key = key_of(s->values[s->ids[i]]);
      digits[count] = (key >> shift) & digit_mask;
      if (by_mass) {
        weights[count] = scaled(s, s->ids[i]);
      }
      count += (key & mask) == prefix ? 1 : 0;
    }
    if (by_mass) {
      for (size_t j = 0; j < BLOCK; ++j) {
        weights[j] = elm_exp(weights[j]);
      }
    }
    for (size_t j = 0; j < count; ++j) {
      s->histogram[digits[j]] += weights[j];
    }
    for (size_t j = 0; by_mass && j < BLOCK; ++j) {
      weights[j] = 0.0;
    }
  }
}

/* Keeps the largest candidates whose weights together reach `limit`: a number of tokens, or with
 * by_mass an unnormalised probability (the token that crosses it stays). Of equal values the lower
 * id goes first. A radix selection, so the time is linear however flat the logits are. */
static void keep_top(sampler* s, bool by_mass, double limit) {
  static const uint32_t shifts[DIGITS] = {20, 10, 0};
  static const uint32_t digit_masks[DIGITS] = {BUCKETS - 1, 1023, 1023};
  uint32_t threshold = 0;
  uint32_t mask = 0;
  double above = 0.0; /* weight of the candidates over the threshold */
  size_t num_kept;
  for (int digit = 0; digit < DIGITS; ++digit) {
    uint32_t chosen = 0;
    double next = above;
    fill_histogram(s, by_mass, threshold, mask, shifts[digit], digit_masks[digit]);
    /* Should rounding keep the sum below the limit, the lowest occupied bucket is chosen. */
    for (uint32_t bucket = digit_masks[digit] + 1; bucket-- > 0 && next < limit;) {
      if (s->histogram[bucket] > 0.0) {
        chosen = bucket;
        above = next;
        next += s->histogram[bucket];
      }
    }
    threshold |= chosen << shifts[digit];
    mask |= digit_masks[digit] << shifts[digit];
    num_kept = 0;
    for (size_t i = 0; i < s->num_ids; ++i) {
      const uint32_t id = s->ids[i];
      s->ids[num_kept] = id;
      num_kept += key_of(s->values[id]) >= threshold ? 1 : 0;
    }
    s->num_ids = num_kept;
  }
  num_kept = 0;
  for (size_t i = 0; i < s->num_ids; ++i) {
    const uint32_t id = s->ids[i];
    if (key_of(s->values[id]) == threshold) {
      if (above >= limit) {
        continue;
      }
      above += by_mass ? elm_exp(scaled(s, id)) : 1.0;
    }
    s->ids[num_kept++] = id;
  }
  s->num_ids = num_kept;
}

/* Applies top-k, then top-p to what is left. */
static void filter(sampler* s, const elm_sampling* sampling) {
  const double top_p = (double)sampling->top_p;
  double total = 0.0;
  if (sampling->top_k > 0 && (size_t)sampling->top_k < s->num_logits) {
    list_candidates(s, LEAST_SCALED);
    keep_top(s, false, (double)sampling->top_k);
    for (size_t i = 0; i < s->num_ids; ++i) {
      total += elm_exp(scaled(s, s->ids[i]));
    }
  } else {
    /* All tokens below this weigh less than 1 - top_p together, and the total is at least 1. */
    total = total_mass(s);
    list_candidates(s, elm_log((1.0 - top_p) / (double)s->num_logits));
  }
  if (top_p < 1.0) {
    keep_top(s, true, top_p * total);
  }
}

/* The candidate with the largest scaled logit plus Gumbel number, which is a sample from their
 * softmax. `first` is the most likely token; `floor` is the least scaled logit that takes part.
 * Candidates whose Gumbel number is bound to be too small are passed over without computing it. */
static uint32_t draw(const sampler* s, bool is_filtered, uint32_t first, double floor,
                     uint64_t stream) {
  const size_t count = is_filtered ? s->num_ids : s->num_logits;
  uint32_t winner = first;
  double best = elm_gumbel(elm_random_bits(stream, first));
  for (size_t i = 0; i < count; ++i) {
    const uint32_t id = is_filtered ? s->ids[i] : (uint32_t)i;
    const double x = scaled(s, id);
    uint64_t bits;
    double score;
    if (x < floor || x + ELM_GUMBEL_MAX < best) {
      continue;
    }
    bits = elm_random_bits(stream, id);
    if (x + elm_gumbel_bound(bits) < best) {
      continue;
    }
    score = x + elm_gumbel(bits);
    if (score > best || (score == best && id < winner)) {
      best = score;
      winner = id;
    }
  }
  return winner;
}

elm_status elm_sampler_run(const float* logits, size_t num_logits, const elm_sampling* sampling,
                           const int32_t* history, size_t num_history, size_t num_generated,
                           uint64_t position, void* scratch, int32_t* id, elm_error* error) {
  const bool is_filtered =
      (sampling->top_k > 0 && (size_t)sampling->top_k < num_logits) || sampling->top_p < 1.0F;
  sampler s = {.histogram = (double*)scratch, .num_logits = num_logits};
  double floor = -DBL_MAX;
  size_t first;
  elm_status status;
  s.values = (float*)(s.histogram + BUCKETS);
  s.ids = (uint32_t*)(s.values + num_logits);
  status = copy_logits(&s, logits, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  apply_penalties(&s, sampling, history, num_history, num_generated);
  first = find_maximum(&s);
  if (s.values[first] == -INFINITY) {
    return elm_fail(error, ELM_STATUS_NONFINITE,
                    "every token is masked (all logits are -inf): no token can be chosen");
  }
  if (sampling->temperature < MIN_TEMPERATURE) {
    *id = (int32_t)first;
    return ELM_STATUS_OK;
  }
  s.maximum = (double)s.values[first];
  s.inverse_temperature = 1.0 / (double)sampling->temperature;
  if (is_filtered) {
    filter(&s, sampling);
  }
  if (sampling->min_p >= FLT_MIN) {
    floor = elm_log((double)sampling->min_p);
  }
  *id = (int32_t)draw(&s, is_filtered, (uint32_t)first, floor,
                      elm_random_stream(sampling->seed, position));
  return ELM_STATUS_OK;
}

elm_status elm_sample(const float* logits, size_t num_logits, const elm_sampling* sampling,
                      const int32_t* history, size_t num_history, size_t num_generated,
                      uint64_t position, int32_t* id, elm_error* error) {
  const elm_status invalid = ELM_STATUS_INVALID_ARGUMENT;
  elm_status status;
  void* scratch;
  if (logits == NULL || id == NULL || (history == NULL && num_history != 0)) {
    return elm_fail(error, invalid, "logits, id or history is NULL");
  }
  if (num_logits == 0 || num_logits > INT32_MAX) {
    return elm_fail(error, invalid, "num_logits is %zu: give 1 to 2147483647", num_logits);
  }
  if (num_generated > num_history) {
    return elm_fail(error, invalid, "num_generated is %zu but the history has %zu tokens",
                    num_generated, num_history);
  }
  for (size_t i = 0; i < num_history; ++i) {
    if (history[i] < 0 || (size_t)history[i] >= num_logits) {
      return elm_fail(error, invalid, "history token %zu is %d: ids go from 0 to %zu", i,
                      (int)history[i], num_logits - 1);
    }
  }
  status = elm_sampling_check(sampling, num_logits, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  scratch = malloc(elm_sampler_scratch_bytes(num_logits));
  if (scratch == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for the sampler (%zu bytes)",
                    elm_sampler_scratch_bytes(num_logits));
  }
  status = elm_sampler_run(logits, num_logits, sampling, history, num_history, num_generated,
                           position, scratch, id, error);
  free(scratch);
  return status;
}

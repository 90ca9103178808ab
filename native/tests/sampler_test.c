/* The sampler: what each parameter means, in the order ARCHITECTURE.md gives. */
#include "runtime/sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "runtime/random.h"

static elm_sampling defaults(void) {
  elm_sampling sampling;
  elm_sampling_default(&sampling);
  return sampling;
}

static int32_t sample(const float* logits, size_t n, const elm_sampling* sampling,
                      uint64_t position) {
  int32_t id = -1;
  elm_error error;
  if (elm_sample(logits, n, sampling, NULL, 0, 0, position, &id, &error) != ELM_STATUS_OK) {
    fprintf(stderr, "%s\n", error.message);
    return -1;
  }
  return id;
}

static int32_t greedy_after(const float* logits, size_t n, elm_sampling sampling,
                            const int32_t* history, size_t num_history, size_t num_generated) {
  int32_t id = -1;
  sampling.temperature = 0.0F;
  CHECK(elm_sample(logits, n, &sampling, history, num_history, num_generated, 0, &id, NULL) ==
        ELM_STATUS_OK);
  return id;
}

static elm_status status_of(const float* logits, size_t n, const elm_sampling* sampling,
                            const char* word) {
  int32_t id;
  elm_error error = {0};
  const elm_status status = elm_sample(logits, n, sampling, NULL, 0, 0, 0, &id, &error);
  if (strstr(error.message, word) == NULL || strchr(error.message, '\n') != NULL) {
    fprintf(stderr, "expected \"%s\" in \"%s\"\n", word, error.message);
    check_failures += 1;
  }
  return status;
}

static void greedy_takes_the_largest_and_of_equals_the_lowest(void) {
  const float logits[5] = {1.0F, 3.0F, -INFINITY, 3.0F, 2.0F};
  const float temperatures[3] = {0.0F, -0.0F, 1e-9F};
  for (int i = 0; i < 3; ++i) {
    elm_sampling sampling = defaults();
    sampling.temperature = temperatures[i];
    CHECK(sample(logits, 5, &sampling, 7) == 1);
  }
}

static void a_broken_logit_is_an_error_wherever_it_is(void) {
  enum { N = 100 };
  float logits[N];
  elm_sampling sampling = defaults();
  for (int where = 0; where < N; where += 33) {
    memset(logits, 0, sizeof logits);
    logits[where] = NAN;
    CHECK(status_of(logits, N, &sampling, "NaN") == ELM_STATUS_NONFINITE);
    logits[where] = INFINITY;
    CHECK(status_of(logits, N, &sampling, "infinite") == ELM_STATUS_NONFINITE);
  }
  for (int i = 0; i < N; ++i) {
    logits[i] = -INFINITY;
  }
  CHECK(status_of(logits, N, &sampling, "masked") == ELM_STATUS_NONFINITE);
  logits[42] = -1000.0F;
  sampling.temperature = 1.0F;
  sampling.top_p = 0.5F;
  for (uint64_t position = 0; position < 100; ++position) {
    CHECK(sample(logits, N, &sampling, position) == 42);
  }
}

static void penalties_touch_each_token_once_and_only_where_they_should(void) {
  elm_sampling sampling = defaults();
  const int32_t zero[2] = {0, 0};
  const float negative[2] = {-2.0F, -2.5F};
  sampling.repetition_penalty = 1.2F; /* -2.4, not -1.67; twice would be -2.88 */
  CHECK(greedy_after(negative, 2, sampling, zero, 2, 0) == 0);
  sampling.repetition_penalty = 1.5F; /* -3 */
  CHECK(greedy_after(negative, 2, sampling, zero, 1, 0) == 1);
  const float positive[2] = {3.0F, 2.5F};
  sampling.repetition_penalty = 1.1F; /* 2.73; twice would be 2.48 */
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 0) == 0);
  sampling.repetition_penalty = 1.3F;
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 0) == 1);

  sampling = defaults();
  sampling.presence_penalty = 0.4F; /* once, however often it was generated */
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 2) == 0);
  sampling.presence_penalty = 0.6F;
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 1) == 1);
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 0) == 0); /* the prompt does not count */
  sampling = defaults();
  sampling.frequency_penalty = 0.3F;
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 1) == 0);
  CHECK(greedy_after(positive, 2, sampling, zero, 2, 2) == 1);

  int32_t id;
  elm_error error;
  const int32_t outside[2] = {0, 2};
  CHECK(elm_sample(positive, 2, &sampling, outside, 2, 0, 0, &id, &error) ==
        ELM_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "history token 1 is 2") != NULL);
  CHECK(elm_sample(positive, 2, &sampling, zero, 2, 3, 0, &id, &error) ==
        ELM_STATUS_INVALID_ARGUMENT);
}

static void bias_is_added_first_and_minus_infinity_bans(void) {
  const float logits[3] = {1.0F, 2.0F, -INFINITY};
  const int32_t ids[2] = {0, 1};
  const float values[2] = {3.0F, 0.5F};
  const float ban[2] = {-INFINITY, -INFINITY};
  const int32_t zero[1] = {0};
  elm_sampling sampling = defaults();
  sampling.bias_ids = ids;
  sampling.bias_values = values;
  sampling.num_bias = 2;
  CHECK(greedy_after(logits, 3, sampling, NULL, 0, 0) == 0);
  sampling.repetition_penalty = 2.0F; /* (1 + 3) / 2 against 2.5; 1 / 2 + 3 would win */
  CHECK(greedy_after(logits, 3, sampling, zero, 1, 0) == 1);
  sampling.bias_values = ban;
  CHECK(status_of(logits, 3, &sampling, "masked") == ELM_STATUS_NONFINITE);
  sampling.num_bias = 1;
  CHECK(greedy_after(logits, 3, sampling, NULL, 0, 0) == 1);
}

static void huge_numbers_do_not_become_infinite(void) {
  const float logits[2] = {FLT_MAX, -FLT_MAX};
  const int32_t ids[2] = {0, 1};
  const float values[2] = {FLT_MAX, -FLT_MAX};
  elm_sampling sampling = defaults();
  sampling.bias_ids = ids;
  sampling.bias_values = values;
  sampling.num_bias = 2;
  sampling.temperature = 1e-5F;
  sampling.repetition_penalty = 1e-30F;
  sampling.top_p = 0.9F;
  int32_t id = -1;
  CHECK(elm_sample(logits, 2, &sampling, ids, 2, 2, 0, &id, NULL) == ELM_STATUS_OK);
  CHECK(id == 0);
}

static void every_bad_parameter_is_named(void) {
  const float logits[4] = {0};
  const int32_t outside[1] = {4};
  const int32_t inside[1] = {3};
  const float one[1] = {1.0F};
  const float nan[1] = {NAN};
  const elm_status invalid = ELM_STATUS_INVALID_ARGUMENT;
  elm_sampling sampling;
#define BAD(field, value, word) \
  sampling = defaults();        \
  sampling.field = (value);     \
  CHECK(status_of(logits, 4, &sampling, word) == invalid)
  BAD(temperature, -0.1F, "temperature");
  BAD(temperature, NAN, "temperature");
  BAD(temperature, INFINITY, "temperature");
  BAD(top_k, -1, "top_k");
  BAD(top_p, 0.0F, "top_p");
  BAD(top_p, 1.5F, "top_p");
  BAD(top_p, NAN, "top_p");
  BAD(min_p, -0.1F, "min_p");
  BAD(min_p, NAN, "min_p");
  BAD(repetition_penalty, 0.0F, "repetition_penalty");
  BAD(repetition_penalty, INFINITY, "repetition_penalty");
  BAD(presence_penalty, NAN, "presence_penalty");
  BAD(frequency_penalty, INFINITY, "frequency_penalty");
  BAD(num_bias, 1, "NULL");
  BAD(struct_size, 0, "elm_sampling_default");
#undef BAD
  sampling = defaults();
  sampling.num_bias = 1;
  sampling.bias_ids = outside;
  sampling.bias_values = one;
  CHECK(status_of(logits, 4, &sampling, "token 4") == invalid);
  sampling.bias_ids = inside;
  sampling.bias_values = nan;
  CHECK(status_of(logits, 4, &sampling, "token 3") == invalid);
  CHECK(status_of(NULL, 4, &sampling, "NULL") == invalid);
  CHECK(status_of(logits, 0, &sampling, "num_logits") == invalid);
}

/* ---- against the definition --------------------------------------------------------------------
 */

static const float* sort_values;

static int by_value(const void* a, const void* b) {
  const int32_t x = *(const int32_t*)a;
  const int32_t y = *(const int32_t*)b;
  if (sort_values[x] != sort_values[y]) {
    return sort_values[x] > sort_values[y] ? -1 : 1;
  }
  return x < y ? -1 : 1;
}

/* The filters as they are defined, by sorting; every Gumbel number computed. */
static int32_t sample_by_definition(const float* logits, size_t n, const elm_sampling* sampling,
                                    uint64_t position) {
  int32_t* order = malloc(n * sizeof *order);
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (logits[i] > -INFINITY) {
      order[count++] = (int32_t)i;
    }
  }
  sort_values = logits;
  qsort(order, count, sizeof *order, by_value);
  const double inverse = 1.0 / (double)sampling->temperature;
  const double maximum = (double)logits[order[0]];
  if (sampling->top_k > 0 && (size_t)sampling->top_k < count) {
    count = (size_t)sampling->top_k;
  }
  double total = 0.0;
  for (size_t i = 0; i < count; ++i) {
    total += exp(((double)logits[order[i]] - maximum) * inverse);
  }
  double sum = 0.0;
  size_t kept = 0;
  while (kept < count && (sampling->top_p == 1.0F || sum < (double)sampling->top_p * total)) {
    sum += exp(((double)logits[order[kept++]] - maximum) * inverse);
  }
  const uint64_t stream = elm_random_stream(sampling->seed, position);
  double best = -INFINITY;
  int32_t winner = -1;
  for (size_t i = 0; i < kept; ++i) {
    const double x = ((double)logits[order[i]] - maximum) * inverse;
    if (exp(x) >= (double)sampling->min_p) {
      const double score = x + elm_gumbel(elm_random_bits(stream, (uint64_t)order[i]));
      if (score > best) {
        best = score;
        winner = order[i];
      }
    }
  }
  free(order);
  return winner;
}

static void all_filters_equal_their_definition(void) {
  static const float top_ps[4] = {1.0F, 0.95F, 0.5F, 0.01F};
  static const float min_ps[3] = {0.0F, 0.03F, 1.0F};
  static const float temperatures[4] = {0.3F, 1.0F, 2.5F, 1e4F};
  static const size_t sizes[5] = {1, 2, 17, 1000, 5000};
  float* logits = malloc(5000 * sizeof(float));
  for (int round = 0; round < 1500; ++round) {
    const size_t n = sizes[check_random() % 5];
    const bool has_ties = check_random() % 3 == 0;
    for (size_t i = 0; i < n; ++i) {
      float value = 0.0F;
      for (int j = 0; j < 4; ++j) {
        value += 4.0F * check_uniform();
      }
      logits[i] = has_ties ? roundf(value * 0.5F) : value;
      if (i > 0 && check_random() % 16 == 0) {
        logits[i] = -INFINITY;
      }
    }
    elm_sampling sampling = defaults();
    sampling.temperature = temperatures[check_random() % 4];
    sampling.top_k = check_random() % 2 == 0 ? 0 : (int32_t)(check_random() % (n + 2));
    sampling.top_p = top_ps[check_random() % 4];
    sampling.min_p = min_ps[check_random() % 3];
    sampling.seed = check_random();
    const uint64_t position = check_random();
    CHECK(sample(logits, n, &sampling, position) ==
          sample_by_definition(logits, n, &sampling, position));
  }
  free(logits);
}

static void flat_logits_keep_the_lowest_ids(void) {
  float logits[1000] = {0};
  elm_sampling sampling = defaults();
  sampling.temperature = 1.0F;
  logits[1] = -0.0F; /* equal to 0 */
  for (uint64_t position = 0; position < 200; ++position) {
    sampling.top_k = 5;
    sampling.top_p = 1.0F;
    CHECK(sample(logits, 1000, &sampling, position) < 5);
    sampling.top_p = 0.5F; /* of the five */
    CHECK(sample(logits, 1000, &sampling, position) < 3);
  }
}

static void samples_follow_the_softmax(void) {
  enum { N = 8, DRAWS = 40000 };
  const float logits[N] = {2.0F, 1.5F, 1.0F, 0.0F, -0.5F, -1.0F, -2.0F, -INFINITY};
  elm_sampling sampling = defaults();
  for (int t = 0; t < 2; ++t) {
    double probabilities[N];
    double total = 0.0;
    double chi_square = 0.0;
    int counts[N] = {0};
    sampling.temperature = t == 0 ? 1.0F : 0.6F;
    for (int i = 0; i < N; ++i) {
      probabilities[i] = exp((double)logits[i] / (double)sampling.temperature);
      total += probabilities[i];
    }
    for (int draw = 0; draw < DRAWS; ++draw) { /* seeds and positions both make fresh numbers */
      sampling.seed = (uint64_t)(draw % 200);
      const int32_t id = sample(logits, N, &sampling, (uint64_t)(draw / 200));
      CHECK(id >= 0 && id < N - 1);
      counts[id] += 1;
    }
    for (int i = 0; i < N - 1; ++i) {
      const double expected = DRAWS * probabilities[i] / total;
      chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    CHECK(chi_square < 22.46); /* 6 degrees of freedom, p = 0.001 */
  }
}

static void the_same_key_draws_the_same_token_on_every_platform(void) {
  enum { N = 300 };
  static const int32_t expected[12] = {294, 128, 49, 218, 267, 27, 188, 76, 294, 264, 169, 155};
  float logits[N];
  elm_sampling sampling = defaults();
  sampling.temperature = 1.0F;
  for (int i = 0; i < N; ++i) {
    logits[i] = (float)((i * 37) % 101) * 0.03125F;
  }
  for (int i = 0; i < 12; ++i) {
    sampling.seed = (uint64_t)(i / 6);
    sampling.top_p = i % 2 == 0 ? 1.0F : 0.9F;
    const int32_t id = sample(logits, N, &sampling, (uint64_t)(i % 6));
    CHECK(id == expected[i]);
    CHECK(id == sample(logits, N, &sampling, (uint64_t)(i % 6)));
  }
}

static void exp_and_log_are_accurate_and_the_bound_is_one(void) {
  double log_error = 0.0;
  double exp_error = 0.0;
  for (int i = 0; i < 200000; ++i) {
    const double x = ldexp(1.0 + (double)check_random() * 0x1p-31, (int)(check_random() % 60) - 30);
    log_error = fmax(log_error, fabs(elm_log(x) - log(x)) / fabs(log(x)));
    const double y = -690.0 * (double)check_random() * 0x1p-31;
    exp_error = fmax(exp_error, fabs(elm_exp(y) / exp(y) - 1.0));
    const uint64_t bits = elm_random_bits(5, (uint64_t)i);
    CHECK(elm_gumbel_bound(bits) >= elm_gumbel(bits));
    CHECK(elm_gumbel(bits) < ELM_GUMBEL_MAX);
  }
  CHECK(log_error < 1e-15);
  CHECK(exp_error < 1e-14);
  CHECK(elm_exp(0.0) == 1.0 && elm_log(1.0) == 0.0);
  for (int i = 0; i < 64; ++i) {
    const uint64_t low = UINT64_MAX >> i;
    const uint64_t high = UINT64_MAX << i;
    CHECK(elm_gumbel_bound(low) >= elm_gumbel(low) && elm_gumbel(low) < ELM_GUMBEL_MAX);
    CHECK(elm_gumbel_bound(high) >= elm_gumbel(high) && elm_gumbel(high) < ELM_GUMBEL_MAX);
  }
  CHECK(isfinite(elm_gumbel(0)));
}

int main(void) {
  greedy_takes_the_largest_and_of_equals_the_lowest();
  a_broken_logit_is_an_error_wherever_it_is();
  penalties_touch_each_token_once_and_only_where_they_should();
  bias_is_added_first_and_minus_infinity_bans();
  huge_numbers_do_not_become_infinite();
  every_bad_parameter_is_named();
  all_filters_equal_their_definition();
  flat_logits_keep_the_lowest_ids();
  samples_follow_the_softmax();
  the_same_key_draws_the_same_token_on_every_platform();
  exp_and_log_are_accurate_and_the_bound_is_one();
  return check_result();
}

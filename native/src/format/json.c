#include "format/json.h"

#include <string.h>

#include "format/limits.h"

static void skip_space(elm_json* cursor) {
  while (cursor->at < cursor->end && (*cursor->at == ' ' || *cursor->at == '\t' ||
                                      *cursor->at == '\n' || *cursor->at == '\r')) {
    ++cursor->at;
  }
}

/* The next character, or 0, which is never part of valid JSON, at the end. */
static char peek(elm_json cursor) {
  if (cursor.at == cursor.end) {
    return 0;
  }
  return *cursor.at;
}

static bool take(elm_json* cursor, char expected) {
  if (peek(*cursor) != expected || expected == 0) {
    return false;
  }
  ++cursor->at;
  return true;
}

static bool is_digit(char character) { return character >= '0' && character <= '9'; }

/* ---- strings ------------------------------------------------------------------------------- */

static bool take_hex4(elm_json* cursor, uint32_t* code) {
  if (cursor->end - cursor->at < 4) {
    return false;
  }
  *code = 0;
  for (int i = 0; i < 4; ++i) {
    const char digit = *cursor->at++;
    uint32_t value;
    if (is_digit(digit)) {
      value = (uint32_t)(digit - '0');
    } else if (digit >= 'a' && digit <= 'f') {
      value = (uint32_t)(digit - 'a') + 10;
    } else if (digit >= 'A' && digit <= 'F') {
      value = (uint32_t)(digit - 'A') + 10;
    } else {
      return false;
    }
    *code = *code << 4 | value;
  }
  return true;
}

/* After the backslash. */
static bool take_escape(elm_json* cursor, uint32_t* code) {
  static const char letters[] = "\"\\/bfnrt";
  static const char meanings[] = "\"\\/\b\f\n\r\t";
  const char letter = peek(*cursor);
  if (letter == 0) {
    return false;
  }
  ++cursor->at;
  if (letter != 'u') {
    const char* found = strchr(letters, letter);
    *code = found != NULL ? (uint32_t)meanings[found - letters] : 0;
    return found != NULL;
  }
  if (!take_hex4(cursor, code)) {
    return false;
  }
  if (*code < 0xD800 || *code > 0xDFFF) {
    return true;
  }
  uint32_t low;
  if (*code > 0xDBFF || !take(cursor, '\\') || !take(cursor, 'u') || !take_hex4(cursor, &low) ||
      low < 0xDC00 || low > 0xDFFF) {
    return false;
  }
  *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
  return true;
}

/* One code point of UTF-8: no overlong form, no surrogate, at most U+10FFFF. */
static bool take_utf8(elm_json* cursor, uint32_t* code) {
  static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
  const uint8_t first = (uint8_t)*cursor->at++;
  if (first < 0x80) {
    *code = first;
    return true;
  }
  const int extra = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  if (first < 0xC2 || first > 0xF4 || cursor->end - cursor->at < extra) {
    return false;
  }
  *code = first & (0x3Fu >> extra);
  for (int i = 0; i < extra; ++i) {
    const uint8_t next = (uint8_t)*cursor->at++;
    if ((next & 0xC0) != 0x80) {
      return false;
    }
    *code = *code << 6 | (next & 0x3Fu);
  }
  return *code >= least[extra] && *code <= 0x10FFFF && (*code < 0xD800 || *code > 0xDFFF);
}

/* One character of a string, whose closing quote is not next. */
static bool take_char(elm_json* cursor, uint32_t* code) {
  const char first = peek(*cursor);
  if ((uint8_t)first < 0x20) {
    return false; /* also at the end */
  }
  if (first == '\\') {
    ++cursor->at;
    return take_escape(cursor, code);
  }
  return take_utf8(cursor, code);
}

static bool take_string(elm_json* cursor) {
  uint32_t code;
  if (!take(cursor, '"')) {
    return false;
  }
  while (!take(cursor, '"')) {
    if (!take_char(cursor, &code)) {
      return false;
    }
  }
  return true;
}

/* Of two checked strings, by code points: below, equal to or above 0. */
static int compare_strings(elm_json a, elm_json b) {
  ++a.at;
  ++b.at;
  for (;;) {
    uint32_t code_a = 0;
    uint32_t code_b = 0;
    const bool ends_a = peek(a) == '"';
    const bool ends_b = peek(b) == '"';
    if (ends_a || ends_b) {
      return (int)ends_b - (int)ends_a;
    }
    if (!take_char(&a, &code_a) || !take_char(&b, &code_b) || code_a != code_b) {
      return code_a < code_b ? -1 : 1;
    }
  }
}

/* ---- numbers ------------------------------------------------------------------------------- */

typedef struct number {
  uint64_t mantissa; /* all digits, without the point */
  int exponent;      /* power of ten it is multiplied by */
  bool is_negative;
  bool is_integer; /* neither point nor exponent, and it fits int64 */
} number;

static int take_digits(elm_json* cursor, number* out) {
  int count = 0;
  for (; is_digit(peek(*cursor)); ++cursor->at, ++count) {
    if (count < 20 && out->mantissa <= (UINT64_MAX - 9) / 10) {
      out->mantissa = out->mantissa * 10 + (uint64_t)(*cursor->at - '0');
    } else {
      count = 20; /* too many for either kind */
    }
  }
  return count;
}

static bool take_number(elm_json* cursor, number* out) {
  *out = (number){0};
  out->is_negative = take(cursor, '-');
  const bool is_zero_first = peek(*cursor) == '0';
  const int num_whole = take_digits(cursor, out);
  if (num_whole == 0 || (is_zero_first && num_whole > 1)) {
    return false;
  }
  int num_digits = num_whole;
  out->is_integer = true;
  if (take(cursor, '.')) {
    const int num_fraction = take_digits(cursor, out);
    if (num_fraction == 0) {
      return false;
    }
    out->is_integer = false;
    out->exponent = -num_fraction;
    num_digits += num_fraction;
  }
  if (peek(*cursor) == 'e' || peek(*cursor) == 'E') {
    ++cursor->at;
    out->is_integer = false;
    const bool is_minus = take(cursor, '-');
    if (!is_minus) {
      (void)take(cursor, '+');
    }
    number power = {0};
    const int num_power = take_digits(cursor, &power);
    if (num_power == 0 || num_power > 2) {
      return false;
    }
    out->exponent += is_minus ? -(int)power.mantissa : (int)power.mantissa;
  }
  if (out->is_integer) {
    const uint64_t most = (uint64_t)INT64_MAX + (out->is_negative ? 1 : 0);
    return num_digits < 20 && out->mantissa <= most;
  }
  return num_digits <= ELM_MAX_JSON_DIGITS;
}

/* ---- checking ------------------------------------------------------------------------------ */

static bool take_word(elm_json* cursor, const char* word) {
  const size_t length = strlen(word);
  if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, word, length) != 0) {
    return false;
  }
  cursor->at += length;
  return true;
}

static bool take_scalar(elm_json* cursor) {
  number ignored;
  switch (peek(*cursor)) {
    case '"': return take_string(cursor);
    case 't': return take_word(cursor, "true");
    case 'f': return take_word(cursor, "false");
    case 'n': return take_word(cursor, "null");
    default: return take_number(cursor, &ignored);
  }
}

typedef struct level {
  bool is_object;
  elm_json key; /* the last one; at is NULL before the first */
} level;

/* A key, which must be above the one before it, and the colon. */
static const char* take_key(elm_json* cursor, level* inner) {
  skip_space(cursor);
  const elm_json key = *cursor;
  if (!take_string(cursor)) {
    return "expected a key";
  }
  if (inner->key.at != NULL && compare_strings(inner->key, key) >= 0) {
    return "a key is out of order or repeated";
  }
  inner->key = key;
  skip_space(cursor);
  return take(cursor, ':') ? NULL : "expected a colon";
}

/* After a value: closes what ends here; *is_done when that was the outermost. */
static const char* take_after_value(elm_json* cursor, level* levels, int* depth, bool* is_done) {
  while (*depth > 0) {
    level* inner = &levels[*depth - 1];
    skip_space(cursor);
    if (take(cursor, ',')) {
      return inner->is_object ? take_key(cursor, inner) : NULL;
    }
    if (!take(cursor, inner->is_object ? '}' : ']')) {
      return "expected a comma or the end of a list or object";
    }
    --*depth;
  }
  *is_done = true;
  skip_space(cursor);
  return cursor->at == cursor->end ? NULL : "text after the value";
}

static const char* check(elm_json* cursor) {
  level levels[ELM_MAX_JSON_DEPTH];
  int depth = 0;
  bool is_done = false;
  const char* problem = NULL;
  while (problem == NULL && !is_done) {
    skip_space(cursor);
    const bool is_object = peek(*cursor) == '{';
    if (!is_object && peek(*cursor) != '[') {
      problem = take_scalar(cursor) ? take_after_value(cursor, levels, &depth, &is_done)
                                    : "not a value, or a number with too many digits";
      continue;
    }
    if (depth == ELM_MAX_JSON_DEPTH) {
      return "nested too deep";
    }
    ++cursor->at;
    skip_space(cursor);
    if (take(cursor, is_object ? '}' : ']')) {
      problem = take_after_value(cursor, levels, &depth, &is_done);
      continue;
    }
    levels[depth] = (level){.is_object = is_object};
    problem = is_object ? take_key(cursor, &levels[depth]) : NULL;
    ++depth;
  }
  return problem;
}

const char* elm_json_check(const char* text, size_t size, elm_json* value, size_t* position) {
  elm_json cursor = {text, text + size};
  const char* problem = check(&cursor);
  *position = (size_t)(cursor.at - text);
  *value = (elm_json){text, text + size};
  skip_space(value);
  return problem;
}

/* ---- walking checked text ------------------------------------------------------------------ */

static void skip_value(elm_json* cursor) {
  int depth = 0;
  do {
    const char first = peek(*cursor);
    if (first == '"') {
      (void)take_string(cursor);
      continue;
    }
    depth += first == '{' || first == '[' ? 1 : first == '}' || first == ']' ? -1 : 0;
    ++cursor->at;
    if (depth == 0 && (first == '}' || first == ']')) {
      break;
    }
  } while (cursor->at < cursor->end && (depth > 0 || strchr(",]} \t\r\n", *cursor->at) == NULL));
  skip_space(cursor);
}

bool elm_json_is_object(elm_json value) { return peek(value) == '{'; }

bool elm_json_member(elm_json object, const char* key, elm_json* value) {
  if (!take(&object, '{')) {
    return false;
  }
  skip_space(&object);
  while (peek(object) == '"') {
    char name[64];
    const bool is_it = elm_json_string(object, name, sizeof name) && strcmp(name, key) == 0;
    (void)take_string(&object);
    skip_space(&object);
    (void)take(&object, ':');
    skip_space(&object);
    if (is_it) {
      *value = object;
      return true;
    }
    skip_value(&object);
    (void)take(&object, ',');
    skip_space(&object);
  }
  return false;
}

bool elm_json_next(elm_json* item, bool* is_first) {
  if (*is_first) {
    *is_first = false;
    if (!take(item, '[')) {
      return false;
    }
    skip_space(item);
    return peek(*item) != ']';
  }
  skip_value(item);
  if (!take(item, ',')) {
    return false;
  }
  skip_space(item);
  return true;
}

bool elm_json_integer(elm_json value, int64_t* out) {
  number read;
  if (!take_number(&value, &read) || !read.is_integer) {
    return false;
  }
  *out = read.is_negative ? (int64_t)(0 - read.mantissa) : (int64_t)read.mantissa;
  return true;
}

/* Exact where the digits fit 53 bits and the power of ten is at most 22: one rounded operation. */
bool elm_json_number(elm_json value, double* out) {
  number read;
  if (!take_number(&value, &read)) {
    return false;
  }
  double magnitude = (double)read.mantissa;
  while (read.exponent != 0) {
    const int size = read.exponent < 0 ? -read.exponent : read.exponent;
    const int step = size < 22 ? size : 22;
    double power = 1;
    for (int i = 0; i < step; ++i) {
      power *= 10;
    }
    magnitude = read.exponent < 0 ? magnitude / power : magnitude * power;
    read.exponent += read.exponent < 0 ? step : -step;
  }
  *out = read.is_negative ? -magnitude : magnitude;
  return true;
}

bool elm_json_boolean(elm_json value, bool* out) {
  *out = peek(value) == 't';
  return *out || peek(value) == 'f';
}

bool elm_json_string(elm_json value, char* out, size_t capacity) {
  if (!take(&value, '"')) {
    return false;
  }
  size_t length = 0;
  while (peek(value) != '"') {
    uint32_t code = 0;
    if (!take_char(&value, &code) || code == 0 || code > 0x7F || length + 1 >= capacity) {
      return false;
    }
    out[length++] = (char)code;
  }
  out[length] = 0;
  return true;
}

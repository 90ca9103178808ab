/* Strict JSON without a tree: the text is checked once, then walked where it lies.
 *
 * Accepted is RFC 8259 in UTF-8 with keys of an object in strictly rising order of their code
 * points (so none twice), at most ELM_MAX_JSON_DEPTH containers within one another, integers of 64
 * bits and decimals of at most ELM_MAX_JSON_DIGITS digits and two digits of exponent. Nothing is
 * allocated. */
#ifndef ELM_FORMAT_JSON_H
#define ELM_FORMAT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A value within checked text: its first character, and the end of the text. */
typedef struct elm_json {
  const char* at;
  const char* end;
} elm_json;

/* NULL and *value if the text is as above; else what is wrong, and *position is where. */
const char* elm_json_check(const char* text, size_t size, elm_json* value, size_t* position);

bool elm_json_is_object(elm_json value);
/* False if `object` is none or has no such member. `key` is ASCII, at most 63 bytes. */
bool elm_json_member(elm_json object, const char* key, elm_json* value);
/* For the first element set `item` to the array and *is_first; false at the end or if it is none.
 */
bool elm_json_next(elm_json* item, bool* is_first);
/* False if the value is of another type. */
bool elm_json_integer(elm_json value, int64_t* out);
bool elm_json_number(elm_json value, double* out);
bool elm_json_boolean(elm_json value, bool* out);
/* Also false if the string is not ASCII or does not fit `capacity` with its closing zero. */
bool elm_json_string(elm_json value, char* out, size_t capacity);

#endif

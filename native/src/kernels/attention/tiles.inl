/* All queries of a call, a tile at a time; a tile's size is a constant in its code. */
void ELM_NAME(const elm_attention_args* args) {
  size_t first = 0;
  for (; first + ELM_QUERY_TILE <= args->num_queries; first += ELM_QUERY_TILE) {
    tile(args, first, ELM_QUERY_TILE);
  }
#if ELM_QUERY_TILE > 1
  switch (args->num_queries - first) {
#if ELM_QUERY_TILE > 2
    case 7: tile(args, first, 7); break;
    case 6: tile(args, first, 6); break;
    case 5: tile(args, first, 5); break;
    case 4: tile(args, first, 4); break;
    case 3: tile(args, first, 3); break;
    case 2: tile(args, first, 2); break;
#endif
    case 1: tile(args, first, 1); break;
    default: break;
  }
#endif
}

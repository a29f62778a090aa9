// Splits the attention of one step into units of work with slots for their results.
#pragma once
#include <vector>

#include "common.h"

namespace tokenloom {

struct Request {
  int first_token;       // index of its first new token in the step
  int prefix;            // tokens whose KV is stored
  int extend;            // new tokens
  const int32_t* pages;  // its row of the page table
};

// Tokens and the page list whose keys they attend to. A piece unit covers 256 keys, for all requests
// that share their pages; a span unit covers all keys of a few tokens of one request.
struct Unit {
  int first, count;  // into Plan::tokens
  int piece;         // -1 for a span
  const int32_t* pages;
};

struct Plan {
  std::vector<Unit> units;
  std::vector<int> tokens;     // tokens of all units, in order
  std::vector<int> positions;  // of each token of the step
  std::vector<int> slots;      // index of each token's first partial result, then the total

  void build(const std::vector<Request>& requests, int page_size);

 private:
  void add_span(const Request& request);
  void add_pieces(std::vector<const Request*>& requests, int page_size);
  std::vector<const Request*> short_, left_;
};

}  // namespace tokenloom

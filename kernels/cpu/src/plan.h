// How the attention of one step is cut into units of work, and where their results go.
#pragma once
#include <vector>

#include "common.h"

namespace tokenloom {

struct Request {
  int first_token;       // index of its first new token in the step
  int prefix;            // tokens whose KV is in place
  int extend;            // new tokens
  const int32_t* pages;  // its row of the page table
};

// Some tokens against keys of one page list. A piece unit covers 256 keys, maybe of many requests
// that share the pages; a span unit covers all keys of a few tokens of one request, piece by piece.
struct Unit {
  int first, count;  // into Plan::tokens
  int piece;         // -1: a span
  const int32_t* pages;
};

struct Plan {
  std::vector<Unit> units;
  std::vector<int> tokens;     // unit by unit
  std::vector<int> positions;  // of every token of the step
  std::vector<int> slots;      // of every token: its first partial result; and the end

  void build(const std::vector<Request>& requests, int page_size);

 private:
  void add_span(const Request& request);
  void add_pieces(std::vector<const Request*>& requests, int page_size);
  std::vector<const Request*> short_, left_;
};

}  // namespace tokenloom

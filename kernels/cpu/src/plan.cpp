// Two ways to split, with the same arithmetic: a long extend is split into spans of tokens, each of
// which walks its pieces in order. Decodes and short extends are split by pieces, so that one long
// request keeps all threads busy and requests that share a prefix read it once.
#include "plan.h"

#include <algorithm>

namespace tokenloom {
namespace {

constexpr int kSpanTokens = 8;
constexpr int kShortExtend = 16;

int pages_of_piece(int page_size) { return std::max(1, kPiece / page_size); }

}  // namespace

void Plan::build(const std::vector<Request>& requests, int page_size) {
  units.clear();
  tokens.clear();
  positions.clear();
  slots.clear();
  short_.clear();
  int slot = 0;
  for (const Request& request : requests) {
    const bool is_short = request.extend < kShortExtend;
    for (int t = 0; t < request.extend; ++t) {
      positions.push_back(request.prefix + t);
      slots.push_back(slot);
      slot += is_short ? (request.prefix + t) / kPiece + 1 : 1;
    }
    if (is_short)
      short_.push_back(&request);
    else
      add_span(request);
  }
  slots.push_back(slot);
  add_pieces(short_, page_size);
}

void Plan::add_span(const Request& request) {
  for (int t = 0; t < request.extend; t += kSpanTokens) {
    const int count = std::min(kSpanTokens, request.extend - t);
    units.push_back({int(tokens.size()), count, -1, request.pages});
    for (int j = 0; j < count; ++j) tokens.push_back(request.first_token + t + j);
  }
}

void Plan::add_pieces(std::vector<const Request*>& requests, int page_size) {
  const int pages = pages_of_piece(page_size);
  for (int piece = 0; !requests.empty(); ++piece) {
    const int begin = piece * kPiece, offset = begin / page_size;
    left_.clear();
    for (const Request* request : requests)
      if (request->prefix + request->extend > begin) left_.push_back(request);
    requests.swap(left_);
    // Sorting by the piece's first page puts equal page lists side by side. Only a piece wholly in
    // the prefix can be shared: keys added by this step belong to one request.
    std::stable_sort(requests.begin(), requests.end(), [&](const Request* a, const Request* b) {
      return a->pages[offset] < b->pages[offset];
    });
    const auto shares = [&](const Request* a, const Request* b) {
      return a->prefix >= begin + kPiece && b->prefix >= begin + kPiece &&
             std::equal(a->pages + offset, a->pages + offset + pages, b->pages + offset);
    };
    for (size_t i = 0; i < requests.size();) {
      const Request* head = requests[i];
      Unit unit{int(tokens.size()), 0, piece, head->pages};
      do {
        const Request& request = *requests[i];
        for (int t = std::max(0, begin - request.prefix); t < request.extend; ++t)
          tokens.push_back(request.first_token + t);
        ++i;
      } while (i < requests.size() && shares(head, requests[i]));
      unit.count = int(tokens.size()) - unit.first;
      units.push_back(unit);
    }
  }
}

}  // namespace tokenloom

// The operations in plain C++, for any machine.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#include "ops.h"

namespace tokenloom {
namespace portable {
#include "math.inl"
#include "rows.inl"
#include "heads.inl"
#include "portable.inl"
#include "sampling.inl"
}
const LinearOps kLinearPortable{"portable", portable::gemm, portable::quantise_row,
                                portable::rms_norm_row,
                                portable::shrink_rows};
const AttentionOps kAttentionPortable{"portable", portable::piece, portable::merge,
                                    portable::rotate, portable::store_query, portable::store_token};
const AttentionOps kAttentionInt8Portable{"portable", portable::int8_piece, portable::merge,
                                    portable::rotate, portable::store_int8_query,
                                    portable::store_int8_token};
const Choose kChoosePortable = portable::choose;
}  // namespace tokenloom

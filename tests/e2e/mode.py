"""The weight mode of the whole-server tests: `make modes` runs them in each, CI in float32."""

import os

DTYPE = os.environ.get("SERVER_DTYPE", "float32")

# How far, in logits of the float32 oracle, the id of an answer may be behind the winner. Float32
# sums in another order differ by about 1e-5. The others are bounded by twice what their rounding
# was seen to do to some 300 ids of this model (bfloat16 0.21, int8 0.75, int4 1.67).
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.4, "int8": 1.5, "int4": 3.4}[DTYPE]

# Integer sums in a fixed order: batch-mates change no bit.
BITWISE = DTYPE in ("int8", "int4")

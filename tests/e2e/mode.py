"""The mode in which the whole-server tests run: `make modes` runs them in each, CI in float32."""

import os

DTYPE = os.environ.get("SERVER_DTYPE", "float32")

# How far, in logits of the float32 oracle, the id of an answer may be behind the winner. Float32
# sums in another order differ by about 1e-5; the others by what their rounding does to this model.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "int8": 0.5, "int4": 0.5}[DTYPE]

# Rows are computed by integer sums in a fixed order: batch-mates change no bit.
BITWISE = DTYPE in ("int8", "int4")

"""Limits on requests that clients and server share. PURE.

`tokenizer_proc/limits.py` lists these beside the limits of the front alone.
"""

MAX_REQUEST_BYTES = 4 << 20  # one message of a client at the socket door; 413 above it
MAX_INPUT_IDS = 1 << 20  # token ids of one message
MAX_MESSAGES = 1024  # messages of a chat
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64

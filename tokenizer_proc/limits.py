"""Every bound of the front and its doors that is not a flag. PURE.

Bounds that clients share are in `wire.limits`; flags are in `wire.door_config.DoorConfig`.
"""

from ..wire.limits import MAX_INPUT_IDS as MAX_INPUT_IDS
from ..wire.limits import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS
from ..wire.limits import MAX_MESSAGES as MAX_MESSAGES
from ..wire.limits import MAX_REQUEST_BYTES as MAX_REQUEST_BYTES
from ..wire.limits import MAX_STOP_CHARS as MAX_STOP_CHARS
from ..wire.limits import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from ..wire.limits import MAX_STOP_TOKEN_IDS as MAX_STOP_TOKEN_IDS

BODY_OVERHEAD_BYTES = 1 << 20  # of a body beside its prompt; see body_limit
BODY_BYTES_PER_TOKEN = 64  # MAX_CHARS_PER_TOKEN characters of four bytes each
MAX_BODIES_BYTES = 256 << 20  # of all bodies that are still coming in; 503 above it
MAX_CONTENT_PARTS = 4096  # parts of content in all messages of a chat
MAX_SAMPLING_BYTES = 1 << 20  # sampling_params of a batch; `sampling` at the socket
MAX_PROMPTS = 128  # prompts of one call: a list of prompts or of token lists
MAX_REQUEST_ID_CHARS = 128  # X-Request-Id and rid; other characters than these are refused too
REQUEST_ID_PATTERN = rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}"
MAX_QUOTED_CHARS = 200  # of a client's value quoted in an error message
MAX_ERROR_CHARS = 4000  # of a whole error message
MAX_LISTED_NAMES = 20  # names that an error message lists
MAX_LABEL_CHARS = 256  # user and cache_salt
MAX_PATH_CHARS = 1024  # lora_path of a load
MAX_KNOWN_LORAS = 4096  # adapter names, those that were evicted included
MAX_INLINE_CHARS = 4096  # longer texts are tokenised beside the loop; this many take up to 4 ms
MAX_CHARS_PER_TOKEN = 16  # longer texts than context * this are refused before they are tokenised
MAX_HEADERS = 100  # 431 above
MAX_HEADER_BYTES = 32 << 10  # names and values of one request together; 431 above

MAX_UNREAD_TOKENS = 4096  # output a client has not read yet; above, its request is aborted
MAX_UNREAD_CHARS = 1 << 20

MAX_AHEAD_BYTES = 16 << 10  # sent ahead of an answer that is due; above it, reading pauses

# The phases of an HTTP connection (doors/phases.py); bytes alone do not begin a time anew.
FIRST_BYTE_SECONDS = 30.0  # until the first byte of the first request
HEAD_SECONDS = 10.0  # from the first to the last byte of the headers; 408 after it
BODY_GRACE_SECONDS = 10.0  # for a body, and another second for each MIN_BODY_RATE bytes; then 408
MIN_BODY_RATE = 1024  # bytes a second
BODY_SECONDS = 120.0  # for a whole body, however fast it comes; 408 after it
SEND_STALL_SECONDS = 30.0  # to take what waits to be sent, and a second for each MIN_SEND_RATE
MIN_SEND_RATE = 16 << 10  # bytes a second
IDLE_SECONDS = 75.0  # between two requests; above the usual 60 s of clients and proxies
LINGER_SECONDS = 5.0  # to throw away what still comes after a refusal, so that it is received

STATS_SECONDS = 2.0  # how long /get_server_info waits for the scheduler's numbers
HEALTH_GENERATE_SECONDS = 10.0
MAX_FLUSH_SECONDS = 600.0  # longest `timeout` of /flush_cache
FLUSH_ANSWER_SECONDS = 10.0  # the scheduler's time to answer after that timeout; then 503
LORA_LOAD_SECONDS = 120.0  # how long a client waits for an adapter to be loaded; 503 after it
SHUTDOWN_SECONDS = 3  # for connections to read their last bytes after a drain

MAX_SOCKET_CONNECTIONS = 512  # clients of the socket door; at more, one that greets is closed
MAX_SOCKET_BYTES = 16 << 20  # one message at the socket door; the connection is closed above it
MAX_SOCKET_PARTIAL_BYTES = 64 << 20  # unfinished messages of all clients; the oldest is closed
MAX_SOCKET_UNREAD_BYTES = 512 << 10  # unsent to one client; above, reading from it pauses
MAX_SOCKET_QUESTIONS = 64  # pending control messages of one client; 503 above
SOCKET_HEARTBEAT_SECONDS = 5.0  # a client that misses three is closed
SOCKET_HANDSHAKE_SECONDS = 10.0
SOCKET_MESSAGE_SECONDS = 60.0  # from the first to the last byte of one message
SOCKET_STALL_SECONDS = 10.0  # a terminal message waits for a client that does not read

RETRY_AFTER_BUSY = 1  # seconds in the Retry-After header of a 503
RETRY_AFTER_LOADING = 5
RETRY_AFTER_DRAINING = 10


def body_limit(context_length: int | None, most: int) -> int:
    """Most bytes of a body: room for a prompt of the whole context, capped at `most`."""
    if context_length is None:  # still loading
        return most
    return min(most, BODY_OVERHEAD_BYTES + BODY_BYTES_PER_TOKEN * context_length)

"""The scheduler's decisions, PURE: no torch, no sockets, no clock, no randomness."""

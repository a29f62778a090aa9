"""Every decision of the scheduler, PURE: no torch, no sockets, no clock, no randomness."""

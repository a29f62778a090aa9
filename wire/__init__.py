"""The contract between the processes, and with clients of the socket door."""

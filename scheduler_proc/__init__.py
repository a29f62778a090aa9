"""The scheduler process: the waiting queue, the KV pool with its prefix tree, and the model runner."""

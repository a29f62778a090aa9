"""The scheduler process: waiting queue, KV pool, prefix tree and model runner."""

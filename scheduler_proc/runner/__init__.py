"""The runner: the model, its KV buffers and the sampler. torch; driven by the event loop alone."""

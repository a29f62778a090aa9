"""The runner: model, KV buffers and sampler, in torch. Called only by the event loop."""

"""The sections of bench/device_check.py: what is right on a GPU, and how fast it is."""

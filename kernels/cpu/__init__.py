"""Native library for CPUs: sources in src/, ctypes binding in native.py."""

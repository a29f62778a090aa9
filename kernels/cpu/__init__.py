"""The native library for CPUs: sources in src/, its ctypes binding in native.py."""

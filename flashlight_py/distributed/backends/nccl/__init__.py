"""CuPy arrays between GPUs through NCCL, bound with CFFI in ABI mode.

NCCL and CuPy are looked for when the first CuPy array asks for them, and never before.
"""

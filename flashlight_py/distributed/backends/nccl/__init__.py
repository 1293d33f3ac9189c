"""Communication of CuPy arrays between GPUs with NCCL, bound with CFFI in ABI mode.

NCCL and CuPy are loaded when the first CuPy array needs them, not earlier.
"""

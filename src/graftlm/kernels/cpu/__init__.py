"""Kernels in C++ for the CPU (`csrc/`), where they were built and the machine can run them."""

"""Kernels of the MLX backend, each beside its plain reference."""

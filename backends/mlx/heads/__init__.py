"""Draft modules that read the target, as MLX modules."""

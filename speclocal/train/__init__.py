"""Training drafters for a target, from nothing but the target itself."""

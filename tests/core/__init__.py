"""Tests of the decoding core: numbers only, no model."""

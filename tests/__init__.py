"""Tests: a package, so that test files of one name may live in several folders."""

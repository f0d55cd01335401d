"""Benchmarks: each prints its figures; none is asserted in a test."""

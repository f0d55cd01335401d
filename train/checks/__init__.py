"""Proofs that a user can run: what is promised is shown on this machine."""

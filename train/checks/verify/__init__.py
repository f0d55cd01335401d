"""`python -m train verify`: whatever way a job is trained, the same gradients and the same weights."""

"""`python -m train collectives`: each operation right, how fast, and which host is slow."""

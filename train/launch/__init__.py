"""The launch plane: hosts in a given order become ranks, one command a host, and one verdict. Never imports torch."""

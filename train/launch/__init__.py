"""The launch plane: hosts become ranks, ranks are started, watched and ended together. Nothing here imports torch."""

"""`python -m train report`: a run folder becomes one page of HTML. Standard library only: agents make it too."""

"""`python -m train <command>`."""

from train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m longgraft` is the command line."""

from longgraft.cli import main

if __name__ == "__main__":
    main()

"""`python -m headrace.cli`."""

from headrace.cli import main

if __name__ == "__main__":
    main()

"""`python -m extkv`: the command line."""

from extkv.cli import main

if __name__ == "__main__":
    main()

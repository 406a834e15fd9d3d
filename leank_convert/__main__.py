"""`python -m leank_convert`."""

from leank_convert.cli import main

if __name__ == "__main__":
    main()

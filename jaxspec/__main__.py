"""`python -m jaxspec`, where the console script is not on the path."""

from jaxspec.cli import main

if __name__ == "__main__":
    main()

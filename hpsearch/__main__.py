"""`python -m hpsearch`: the command line, where the console script is not on the path."""

from hpsearch.cli import main

main()

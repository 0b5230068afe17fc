"""`python -m moonpool` is the `moonpool` command."""

from moonpool.cli.main import main

main()

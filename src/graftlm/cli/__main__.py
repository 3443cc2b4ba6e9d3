"""`python -m graftlm.cli` is `graft`."""

from graftlm.cli.main import main

main()

"""`python -m gymgate`."""

from gymgate.cli import main

main()

"""`python -m gymgate`."""

from gymgate._entry import main

main()

"""`python -m onebox`."""

from onebox.cli.entry import main

main()

"""`python -m deeplink` is the `deeplink` command."""

from deeplink.cli import main

main()

"""``python -m relax_sdk`` is the command ``relax-sdk``."""

from relax_sdk.cli import main

if __name__ == "__main__":
    main()

"""The command line: ``relax-sdk``. Data goes to stdout, talk to stderr; a user's mistake ends without a traceback.

Exit codes are the error classes' (`relax_sdk.errors`): 0 ok, 1 the run failed, 2 usage or configuration, 3 a plug-in,
4 preflight, 130 interrupted. Importing this, ``--help`` and ``plugins list`` load neither torch nor Ray; commands are
imported when they are called.
"""

from relax_sdk.cli.app import main

__all__ = ["main"]

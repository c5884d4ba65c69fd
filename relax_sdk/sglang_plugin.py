"""Entry point of SGLang's plug-in group: does nothing unless a rollout engine of ours started the server.

This module stays this small because SGLang imports it in every server on a machine where the project is installed.
"""

from __future__ import annotations

import os

__all__ = ["activate"]

# The same text as `relax_sdk.rollout.sglang.session.SESSION_VARIABLE`, whose import would load torch.
_SESSION_VARIABLE = "RELAX_SGLANG_SESSION"


def activate() -> None:
    """Install the server side in a server of ours; anybody else's SGLang stays as it is."""
    if os.environ.get(_SESSION_VARIABLE):
        from relax_sdk.rollout.sglang.server_side.plugin import install

        install()

"""What the engine and its server agree on before they can talk: environment names and the report's layout."""

from __future__ import annotations

__all__ = [
    "CONTROL_FORMAT",
    "LIFELINE_VARIABLE",
    "OWNER_VARIABLE",
    "RECIPE_KEY",
    "SESSION_VARIABLE",
    "STOCK_VARIABLE",
    "report_name",
]

SESSION_VARIABLE = "RELAX_SGLANG_SESSION"
"""A folder of the engine that started the server; without it the plug-in does nothing at all."""
OWNER_VARIABLE = "RELAX_SGLANG_OWNER"
"""``pid:start time`` of the process that owns the server, so that a leftover can be told from a running one."""
LIFELINE_VARIABLE = "RELAX_SGLANG_LIFELINE"
"""File descriptor of a pipe that the owner keeps open; at its end the server ends itself."""
CONTROL_FORMAT = "relax-control"
"""``load_format`` of the requests that the plug-in answers itself."""
STOCK_VARIABLE = "RELAX_SGLANG_STOCK_UPDATES"
"""Lets SGLang's own weight updates through, for measuring them."""
RECIPE_KEY = "relax_recipe"
"""Key of the sampling recipe inside a request's ``diffusers_kwargs``."""


def report_name(rank: int) -> str:
    """File in the session folder in which worker ``rank`` says what it applied."""
    return f"worker-{rank}.json"

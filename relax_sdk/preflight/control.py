"""Rules about who can reach the run's controller."""

from __future__ import annotations

from collections.abc import Iterator

from relax_sdk.control import TOKEN_VARIABLE, control_token, is_loopback
from relax_sdk.errors import ConfigError
from relax_sdk.preflight.situation import Rule, Situation

__all__ = ["RULES"]


def controller_is_protected(situation: Situation) -> Iterator[str]:
    """Whoever reaches the controller can stop the run, so beyond this machine it asks for a token."""
    control = situation.config.control
    if not control.control:
        return
    try:
        token = control_token(token_file=control.control_token_file, environ=situation.environ)
    except ConfigError as error:
        yield f"{error.where}: {error.what}" + (f"; expected {error.expected}" if error.expected else "")
        return
    if token is None and not is_loopback(control.control_host):
        yield (
            f"{situation.given('control.control_host')}: other machines reach it, so it needs a token; set "
            f"{TOKEN_VARIABLE} or give --control-token-file"
        )


RULES: tuple[Rule, ...] = (controller_is_protected,)

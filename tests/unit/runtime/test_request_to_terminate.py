"""SIGTERM while the roles run: the exit code is 128 + 15 whatever happened to the exit on its way."""

from __future__ import annotations

import os
import signal
import time

import pytest

from relax_sdk.runtime.waiting import sigterm_unwinds


def wait_as_ray_does(*, code: int | None) -> None:
    """Ray's core calls signal handlers itself while it waits, and turns an exit into one with its own code."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    except SystemExit as asked:
        raise asked if code is None else SystemExit(code)  # noqa: B904


@pytest.mark.parametrize("code", [None, 1])
def test_the_exit_code_is_kept(code: int | None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_unwinds():
        wait_as_ray_does(code=code)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_exit_is_left_as_it_is() -> None:
    with pytest.raises(SystemExit) as caught, sigterm_unwinds():
        raise SystemExit(7)
    assert caught.value.code == 7

"""Registers everything with SGLang's plug-in mechanism, and reports what really took hold.

SGLang logs and skips a hook whose target is missing; so each worker writes what is applied into the session folder
after its model is loaded, and the engine refuses a server whose report is not complete.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_sdk.files import write_text_atomically
from relax_sdk.rollout.sglang.server_side.control import WorkerControl, answer_control, guard_forward
from relax_sdk.rollout.sglang.server_side.cpu_ops import register_cpu_ops
from relax_sdk.rollout.sglang.server_side.recipe import SAMPLER_HOOKS
from relax_sdk.rollout.sglang.session import LIFELINE_VARIABLE, SESSION_VARIABLE, report_name
from relax_sdk.rollout.sglang.targets import EXECUTE_FORWARD, LOAD_MODEL, UPDATE_WEIGHTS

__all__ = ["install"]


def _hooks() -> Mapping[str, Callable[..., Any]]:
    return {
        **SAMPLER_HOOKS,
        UPDATE_WEIGHTS: answer_control,
        LOAD_MODEL: _report_after_loading,
        EXECUTE_FORWARD: guard_forward,
    }


def install() -> None:
    """Entry point of ``sglang.multimodal_gen.plugins``, called once in every process of a server of ours."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    _watch_lifeline()
    register_cpu_ops()
    for target, hook in _hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _report_after_loading(original: Callable[..., Any], worker: Any) -> Any:
    """AROUND ``GPUWorker.init_device_and_model``: write the report of this worker."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    result = original(worker)
    control = WorkerControl.of(worker)
    folder = Path(os.environ[SESSION_VARIABLE])
    applied = sorted(set(_hooks()) & set(HookRegistry._patched))
    report = {"rank": worker.rank, "pid": os.getpid(), "hooks": applied, "worker": control.describe()}
    write_text_atomically(folder / report_name(worker.rank), json.dumps(report))
    return result


def _watch_lifeline() -> None:
    """End this server when its owner is gone, whatever ended it: the owner holds the other end of a pipe."""
    value = os.environ.pop(LIFELINE_VARIABLE, None)
    if value is None:
        return  # a worker: SGLang ends it with its parent
    descriptor = int(value)

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="relax-lifeline", daemon=True).start()

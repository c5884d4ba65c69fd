"""`SGLangNativeGenerationEngine`: a stock SGLang server as a `RolloutEngine`.

One server per engine, on the engine's own devices. By default one request carries one candidate: kernels round by
batch size, and a candidate must be a function of its seeds and the weights alone. Weights arrive in the server's
workers straight from the actor's device memory; only descriptions pass through here.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

from relax_sdk.errors import RolloutError, WeightSyncError
from relax_sdk.protocols import EngineSettings, RolloutRequest, RolloutResponse, SyncOffer, WeightBucket
from relax_sdk.rollout.sglang.client import ServerUnreachableError, SGLangClient
from relax_sdk.rollout.sglang.messages import decode_tensors, rollout_body, rollout_response
from relax_sdk.rollout.sglang.process import ServerProcess, leftover_servers

__all__ = ["SGLangNativeGenerationEngine"]

# Below the driver's own limit of 1,800 s, so that the server's last lines are in the error.
_START_LIMIT_S = 1500.0
_LEFTOVER_GRACE_S = 10.0
_OWN_ARGUMENTS = frozenset(
    f"--{name}"
    for name in (
        *("model-path", "model-id", "model-type", "backend", "num-gpus", "tp-size", "host", "port", "scheduler-port"),
        *("master-port", "batching-max-size", "dit-precision", "vae-precision", "text-encoder-precisions"),
        *("warmup-mode", "lora-path", "config", "revision"),
        *("dit-cpu-offload", "text-encoder-cpu-offload", "vae-cpu-offload"),
    )
)
_ADAPTER_NEEDS = (
    *("sglang_model_id", "sglang_sampling_params", "sglang_text_was_cut"),
    *("conditions_from_sglang", "pack_initial_noise"),
)


class SGLangNativeGenerationEngine:
    """A `RolloutEngine` around ``sglang serve``.

    Args:
        adapter: the model family; needs the `SGLangModelAdapter` protocol.
        settings: model, devices, dtype, folder.
    """

    def __init__(self, *, adapter: Any, settings: EngineSettings) -> None:
        missing = [name for name in _ADAPTER_NEEDS if not hasattr(adapter, name)]
        if missing:
            raise RolloutError(
                f"adapter {type(adapter).__name__} cannot be served by SGLang: it lacks {', '.join(missing)}",
                expected="an adapter with the SGLangModelAdapter protocol, or another --rollout-engine",
            )
        # SGLang's parser takes ``--flag=value`` and underscores too.
        flags = (text.partition("=")[0].replace("_", "-") for text in settings.extra_arguments if text.startswith("--"))
        taken = sorted(set(flags) & _OWN_ARGUMENTS)
        if taken:
            raise RolloutError(
                f"{', '.join(taken)} is decided by the engine", where="--rollout-engine-args", expected="other flags"
            )
        self.policy_version = 0
        self._adapter, self._settings = adapter, settings
        self._invalid: str | None = "the engine was not started"
        self._server: ServerProcess | None = None
        self._client: SGLangClient | None = None
        # Whether the server knows of a sync that an abort would drop, or take back once it is committed.
        self._begun = False
        self._gone: str | None = None

    def start(self) -> None:
        """Check the installed SGLang, start the server, and wait until it serves with everything applied.

        Raises:
            RolloutError: SGLang does not fit, a server of an earlier run is still there, or it did not start.
        """
        from relax_sdk.rollout.sglang.contract import require_contract
        from relax_sdk.rollout.sglang.targets import REQUIRED_HOOKS

        require_contract()
        # The server of an engine that is being replaced was told to end only just now.
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        while (left := leftover_servers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise RolloutError(
                f"{len(left)} processes of an SGLang server whose run is gone are still there: " + "; ".join(left),
                next_step="end them with the commands above, then start again",
            )
        self._server = ServerProcess(
            arguments=self._arguments(),
            environ=self._environ(),
            folder=self._settings.work_dir,
            workers=self._settings.devices,
            required=REQUIRED_HOOKS,
            timeout_s=self._settings.timeout_s,
        )
        self._client = self._server.start(limit_s=_START_LIMIT_S)
        self.policy_version, self._invalid, self._begun, self._gone = 0, None, False, None
        try:
            self._require_own_server()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the server and everything it started. Safe to call twice."""
        self._invalid = "the engine was shut down"
        if self._server is not None:
            self._server.stop()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResponse]:
        """Sample every group with one request each; see `RolloutEngine.generate`."""
        for request in requests:
            if request.plan.policy_version != self.policy_version or self._invalid is not None:
                raise RolloutError(
                    f"policy version mismatch: the engine holds {self.policy_version}"
                    + (f" ({self._invalid})" if self._invalid else "")
                    + f", the request is for {request.plan.policy_version}",
                    where=f"group {request.plan.group_index}",
                )
        return [self._generate_group(request) for request in requests]

    def release(self) -> None:
        """Free the pipeline's parameters on the device; under full sync the transformer's are not kept.

        Raises:
            RolloutError: fatal: the memory may still be taken.
        """
        self._control("release", sync_mode=self._settings.sync_mode)
        if self._settings.sync_mode == "full":
            self._invalid = "its weights were released for the next weight sync"

    def resume(self, *, weights_only: bool = False) -> None:
        """Take the device memory again, for the transformer alone with ``weights_only``.

        Raises:
            RolloutError: fatal: the pipeline is not whole.
        """
        self._control("resume", weights_only=weights_only)

    def begin_sync(self, offer: SyncOffer) -> None:
        """See `RolloutEngine.begin_sync`; the server's workers check the offer and open their buffers."""
        self._begun = False
        if offer.manifest.mode != self._settings.sync_mode:
            raise WeightSyncError(
                f"a sync in mode {offer.manifest.mode!r} came", expected=f"mode {self._settings.sync_mode!r}"
            )
        self._sync("begin", offer=offer.model_dump(mode="json"))
        self._begun = True

    def receive(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.receive`."""
        if self._settings.sync_mode == "full":
            self._invalid = f"a weight sync after version {self.policy_version} is not finished"
        self._sync("receive", bucket=bucket.model_dump(mode="json"))

    def commit_sync(self, policy_version: int) -> str:
        """See `RolloutEngine.commit_sync`."""
        answer = self._sync("commit", policy_version=policy_version)
        self.policy_version, self._invalid = policy_version, None
        return str(answer["checksum"])

    def abort_sync(self) -> None:
        """See `RolloutEngine.abort_sync`."""
        begun, self._begun = self._begun, False
        self._invalid = "a weight sync was aborted and the server did not say what it holds"
        # Only of this very sync, whether or not its commit was answered; never of the one before it.
        answer = self._sync("abort", undo=begun)
        self.policy_version, self._invalid = int(answer["version"]), answer["invalid"]

    def problem(self) -> str | None:
        """How the server ended, or that it stopped answering; None while it serves."""
        if self._server is None:
            return "the SGLang engine was not started"
        return self._server.problem() or self._gone

    def state(self) -> dict[str, Any]:
        """Version, what is released, and memory in bytes, as the server's first worker reports them."""
        return self._control("state")

    def weights_checksum(self) -> str:
        """SGLang's own sha256 over the transformer's parameters."""
        checksum: str = self._guarded(lambda client: client.weights_checksum("transformer"))
        return checksum

    def _generate_group(self, request: RolloutRequest) -> RolloutResponse:
        count = len(request.plan.sample_ids)
        size = self._settings.candidates_per_request or 1
        items: list[dict[str, Any]] = []
        for start in range(0, count, size):
            body = rollout_body(
                request,
                slice(start, min(start + size, count)),
                sampling_params=self._adapter.sglang_sampling_params,
            )
            items += decode_tensors(self._guarded(operator.methodcaller("generate", body)))
        return rollout_response(request, items, adapter=self._adapter, dtype=self._settings.dtype)

    def _require_own_server(self) -> None:
        """Its port was free when it was chosen; another server could have taken it before ours did."""
        found = self.state().get("session")
        if found != str(self._settings.work_dir):
            raise RolloutError(
                f"the server that answers is of {found!r}, not of {str(self._settings.work_dir)!r}",
                where="starting the rollout engine",
                next_step="start again: another program took the port that was chosen",
            )

    def _control(self, operation: str, **values: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._guarded(lambda client: client.control(operation, **values))
        return answer

    def _sync(self, operation: str, **values: Any) -> dict[str, Any]:
        try:
            return self._control(operation, **values)
        except RolloutError as error:
            raise WeightSyncError(error.what, where=error.where, next_step=error.next_step) from error

    def _guarded(self, call: Callable[[SGLangClient], Any]) -> Any:
        """Run a call; when the server is gone, say how it ended instead of how the connection did."""
        if self._client is None or self._server is None:
            raise RolloutError("the SGLang engine was used before start")
        gone = self._gone or self._server.problem()
        if gone is None:
            try:
                return call(self._client)
            except ServerUnreachableError as error:
                gone = self._server.wait_problem(limit_s=2.0)
                if gone is None:
                    gone = f"{error}; the server still runs and does not answer; its last lines:\n{self._server.tail()}"
            except RolloutError:
                # Perhaps the answer of a server whose worker has ended.
                gone = self._server.problem()
                if gone is None:
                    raise
        self._invalid, self._gone = "the SGLang server is gone", gone
        raise RolloutError(gone, where="engine 'sglang'")

    def _arguments(self) -> list[str]:
        settings = self._settings
        precision = settings.dtype
        arguments = [
            *("--model-path", settings.model_path, "--model-type", "diffusion", "--backend", "sglang"),
            *("--model-id", self._adapter.sglang_model_id),
            # Otherwise an idle server spins a core, which the trainer needs while it has its turn.
            "--sleep-on-idle",
            *("--num-gpus", str(settings.devices), "--tp-size", "1", "--batching-max-size", "1"),
            *("--dit-precision", precision, "--vae-precision", precision),
            *("--text-encoder-precisions", precision),
            # Warm-up requests would come without a recipe.
            *("--warmup-mode", "off"),
            # Residency is decided here, not by SGLang's guess about free memory.
            *("--dit-cpu-offload", "false", "--text-encoder-cpu-offload", "false", "--vae-cpu-offload", "false"),
            *("--strict-ports", "true", "--log-level", "info"),
        ]
        if settings.revision is not None:
            arguments += ["--revision", settings.revision]
        # Of a flag that is given twice the last one counts, also when the first is an abbreviation.
        return [*settings.extra_arguments, *arguments]

    def _environ(self) -> dict[str, str]:
        # A person's list of plug-ins for another SGLang would leave ours out.
        environ = {"TOKENIZERS_PARALLELISM": "false", "SGLANG_PLUGINS": ""}
        if self._settings.device == "cpu":
            environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self._settings.threads)}
        return environ

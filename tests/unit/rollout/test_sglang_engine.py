"""The engine's own state: which weights it may sample with after everything that a server can answer, or not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang import LORA, FakeServer, ServedAdapter, answering, outputs_for, requests_for
from tiny_family import TinyAdapter
from tiny_sync import CPU, buckets_of, engine_settings, offer_of

from relax_sdk.errors import PreflightError, RolloutError, WeightSyncError
from relax_sdk.protocols import RolloutEngine, SyncOffer, WeightBucket
from relax_sdk.rollout.sglang import contract, engine
from relax_sdk.rollout.sglang.client import ServerUnreachableError
from relax_sdk.rollout.sglang.engine import SGLangNativeGenerationEngine
from relax_sdk.rollout.sglang.session import RECIPE_KEY
from relax_sdk.rollout.sglang.targets import REQUIRED_HOOKS
from relax_sdk.weights import SendBuffer

TENSORS = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}
LORA_TENSORS = {"a.lora_A.weight": torch.ones(3, 2), "a.lora_B.weight": torch.ones(2, 3)}


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer.made = []
    monkeypatch.setattr(engine, "ServerProcess", FakeServer)
    monkeypatch.setattr(engine, "leftover_servers", lambda: [])
    monkeypatch.setattr(contract, "require_contract", lambda: None)


def started(**changes: Any) -> tuple[SGLangNativeGenerationEngine, FakeServer]:
    made = SGLangNativeGenerationEngine(adapter=ServedAdapter(), settings=engine_settings(**changes))
    made.start()
    server = FakeServer.made[-1]
    assert [server.operations.pop()[0], *server.operations] == ["state"], "whether it is the engine's own server"
    server.script |= {"commit": {"checksum": "5f"}, "abort": {"version": 0, "invalid": None}}
    return made, server


def offer(adapter: bool = False) -> SyncOffer:
    with SendBuffer.open(CPU, 4096) as buffer:
        return offer_of(LORA_TENSORS if adapter else TENSORS, [buffer.handle], LORA if adapter else None)


def bucket() -> WeightBucket:
    return buckets_of(TENSORS, 2)[0][0]


def samples(made: SGLangNativeGenerationEngine, server: FakeServer, version: int) -> bool:
    """Whether it would sample for a version; a refusal must not reach the server."""
    requests = requests_for(version=version, count=1)
    server.script["generate"] = answering(requests)
    before = len(server.bodies)
    try:
        made.generate(requests)
    except RolloutError:
        assert len(server.bodies) == before
        return False
    return True


def sync(made: SGLangNativeGenerationEngine, version: int, adapter: bool = False) -> str:
    made.begin_sync(offer(adapter))
    made.receive(bucket())
    return made.commit_sync(version)


# --- construction and start -------------------------------------------------------------------------------------------


def test_it_is_a_rollout_engine() -> None:
    made, _ = started()
    assert isinstance(made, RolloutEngine)
    assert made.policy_version == 0
    assert made.problem() is None


def test_an_adapter_without_the_protocol_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(RolloutError, match=r"adapter TinyAdapter cannot be served by SGLang: it lacks (.*)") as caught:
        SGLangNativeGenerationEngine(adapter=TinyAdapter(), settings=engine_settings())
    assert caught.value.what.endswith(
        "sglang_model_id, sglang_sampling_params, sglang_text_was_cut, conditions_from_sglang"
    )
    assert "another --rollout-engine" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [("--tp-size", "2"), ("--tp-size=2",), ("--tp_size", "2"), ("--warmup_mode=full",), ("--config", "mine.yaml")],
)
def test_arguments_that_the_engine_decides_are_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(RolloutError, match=r"--[\w-]+ is decided by the engine\n.*--rollout-engine-args"):
        SGLangNativeGenerationEngine(adapter=ServedAdapter(), settings=engine_settings(extra_arguments=extra))


def test_the_server_is_told_everything_that_it_would_otherwise_guess(tmp_path: Path) -> None:
    _, server = started(
        model_path="/m",
        revision="abc",
        devices=2,
        dtype="bf16",
        work_dir=tmp_path,
        timeout_s=7.0,
        threads=3,
        extra_arguments=("--attention-backend", "torch_sdpa"),
    )
    told = server.arguments
    told["arguments"].remove("--sleep-on-idle")
    flags = dict(zip(told["arguments"][::2], told["arguments"][1::2], strict=True))
    assert flags == {
        "--model-path": "/m",
        "--model-type": "diffusion",
        "--backend": "sglang",
        "--model-id": "Tiny",
        "--num-gpus": "2",
        "--tp-size": "1",
        "--batching-max-size": "1",
        "--dit-precision": "bf16",
        "--vae-precision": "bf16",
        "--text-encoder-precisions": "bf16",
        "--warmup-mode": "off",
        "--dit-cpu-offload": "false",
        "--text-encoder-cpu-offload": "false",
        "--vae-cpu-offload": "false",
        "--strict-ports": "true",
        "--log-level": "info",
        "--revision": "abc",
        "--attention-backend": "torch_sdpa",
    }
    # of two values the last one counts
    assert told["arguments"].index("--attention-backend") < told["arguments"].index("--model-path")
    assert (told["workers"], told["required"], told["timeout_s"]) == (2, REQUIRED_HOOKS, 7.0)
    assert told["folder"] == tmp_path
    assert told["environ"]["SGLANG_PLUGINS"] == "", "a person's list would leave our plug-in out"
    assert (told["environ"]["CUDA_VISIBLE_DEVICES"], told["environ"]["OMP_NUM_THREADS"]) == ("", "3")


def test_on_a_gpu_the_devices_are_the_processes_own() -> None:
    _, server = started(device="cuda")
    assert "CUDA_VISIBLE_DEVICES" not in server.arguments["environ"]


def test_nothing_is_started_when_sglang_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PreflightError(["no such hook"])

    monkeypatch.setattr(contract, "require_contract", refuse)
    with pytest.raises(PreflightError):
        started()
    assert FakeServer.made == []


def test_a_leftover_server_is_named_with_the_command_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_LEFTOVER_GRACE_S", 0.2)
    monkeypatch.setattr(engine, "leftover_servers", lambda: ["pid 7 (python): kill -9 -- -7"])
    with pytest.raises(RolloutError, match=r"1 processes of an SGLang server.*: pid 7 \(python\): kill -9 -- -7"):
        started()
    assert FakeServer.made == []


def test_a_server_that_is_just_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart, when its owner was killed a moment ago."""
    looks = iter([["pid 7 (python): kill -9 -- -7"], ["pid 7 (python): kill -9 -- -7"], []])
    monkeypatch.setattr(engine, "leftover_servers", lambda: next(looks))
    made, server = started()
    assert samples(made, server, 0)


def test_a_server_of_somebody_else_on_its_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(self: FakeServer, *, limit_s: float) -> Any:
        self.script["state"] = {"session": "/another/run/engines/0", "version": 0}
        return start(self, limit_s=limit_s)

    start = FakeServer.start
    monkeypatch.setattr(FakeServer, "start", another)
    made = SGLangNativeGenerationEngine(adapter=ServedAdapter(), settings=engine_settings())
    with pytest.raises(RolloutError, match="the server that answers is of '/another/run/engines/0', not of"):
        made.start()
    assert FakeServer.made[-1].stops == 1
    with pytest.raises(RolloutError, match="the engine was shut down"):
        made.generate(requests_for())


def test_before_the_start_and_after_the_end_nothing_is_sampled() -> None:
    made = SGLangNativeGenerationEngine(adapter=ServedAdapter(), settings=engine_settings())
    assert made.problem() == "the SGLang engine was not started"
    with pytest.raises(RolloutError, match="the engine was not started"):
        made.generate(requests_for())
    with pytest.raises(RolloutError, match="used before start"):
        made.state()
    made.shutdown()

    made, server = started()
    made.shutdown()
    made.shutdown()
    assert server.stops >= 1
    assert not samples(made, server, 0)


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "chunks"), [(None, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (8, [5])])
def test_candidates_travel_in_requests_of_the_chosen_size_and_come_back_in_order(
    size: int | None, chunks: list[int]
) -> None:
    made, server = started(candidates_per_request=size)
    requests = requests_for(count=5, prompts=("red", "blue"))
    server.script["generate"] = answering(requests)
    responses = made.generate(requests)
    assert [body["num_outputs_per_prompt"] for body in server.bodies] == chunks * 2
    for request, response in zip(requests, responses, strict=True):
        expected = torch.stack([output["dit_trajectory"]["latents"] for output in outputs_for(request)])
        assert torch.equal(response.trajectory_latents, expected)
    seeds = [
        seed
        for body in server.bodies
        for seed in body["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY]["initial_noise_seeds"]
    ]
    assert seeds == [seed for request in requests for seed in request.plan.initial_noise_seeds]
    assert all(body["extra_sampling_params"]["max_sequence_length"] == 30 for body in server.bodies)


def test_no_requests_ask_nothing() -> None:
    made, server = started()
    assert made.generate([]) == []
    assert server.bodies == []


def test_a_request_for_other_weights_is_refused_before_any_is_sampled() -> None:
    made, server = started()
    with pytest.raises(RolloutError, match=r"policy version mismatch: the engine holds 0, the request is for 1"):
        made.generate([*requests_for(version=0), *requests_for(version=1)])
    assert server.bodies == []


def test_an_answer_that_lacks_something_is_refused() -> None:
    made, server = started()
    requests = requests_for(count=2)
    server.script["generate"] = lambda body: [{"text": "no tensors"}]
    with pytest.raises(RolloutError, match=r"output 1 lacks dit_trajectory\.latents"):
        made.generate(requests)


# --- a server that does not answer ------------------------------------------------------------------------------------


def test_a_server_that_died_is_told_by_how_it_ended_and_is_not_used_again() -> None:
    made, server = started()
    server.script["generate"] = ServerUnreachableError("connection reset")
    server.ends_later = "the SGLang server ended with signal 9 (SIGKILL)"
    with pytest.raises(RolloutError, match="signal 9") as caught:
        made.generate(requests_for())
    assert "connection reset" not in str(caught.value)
    assert made.problem() == server.ends_later
    assert not samples(made, server, 0)
    with pytest.raises(WeightSyncError, match="signal 9"):
        made.begin_sync(offer())
    assert server.operations == []


def test_a_server_that_hangs_is_told_with_its_last_lines() -> None:
    made, server = started()
    server.script["generate"] = ServerUnreachableError("SGLang did not answer within 5 s")
    with pytest.raises(RolloutError, match=r"within 5 s; the server still runs.*\n  \| the last line"):
        made.generate(requests_for())
    assert not samples(made, server, 0)
    assert made.problem() is not None, "so that it is restarted"


def test_a_refusal_of_the_server_does_not_make_the_weights_invalid() -> None:
    made, server = started()
    server.script["generate"] = RolloutError("SGLang answered 500: out of memory")
    with pytest.raises(RolloutError, match="out of memory"):
        made.generate(requests_for())
    assert samples(made, server, 0)


# --- weight sync ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "adapter"])
def test_a_sync_is_told_to_the_server_and_adopted_at_the_commit(mode: str) -> None:
    made, server = started(sync_mode=mode)
    assert sync(made, 3, adapter=mode == "adapter") == "5f"
    assert [name for name, _ in server.operations] == ["begin", "receive", "commit"]
    told = SyncOffer.model_validate(server.operations[0][1]["offer"])
    expected = offer(mode == "adapter")
    assert told.model_copy(update={"buffers": expected.buffers}) == expected
    assert server.operations[1][1] == {"bucket": bucket().model_dump(mode="json")}
    assert server.operations[2][1] == {"policy_version": 3}
    assert made.policy_version == 3
    assert samples(made, server, 3)
    assert not samples(made, server, 0)


@pytest.mark.parametrize(("mode", "usable"), [("full", False), ("adapter", True)])
def test_during_a_sync_only_an_adapter_engine_still_has_its_weights(mode: str, usable: bool) -> None:
    made, server = started(sync_mode=mode)
    made.begin_sync(offer(mode == "adapter"))
    assert samples(made, server, 0)
    made.receive(bucket())
    assert samples(made, server, 0) == usable


@pytest.mark.parametrize("mode", ["full", "adapter"])
def test_a_sync_in_the_other_mode_is_refused_here(mode: str) -> None:
    made, server = started(sync_mode=mode)
    sync(made, 1, adapter=mode == "adapter")
    server.operations.clear()
    with pytest.raises(WeightSyncError, match=f"expected: mode '{mode}'"):
        made.begin_sync(offer(mode == "full"))
    assert server.operations == []
    # The abort that follows must not undo the sync before.
    server.script["abort"] = {"version": 1, "invalid": None}
    made.abort_sync()
    assert server.operations == [("abort", {"undo": False})]
    assert samples(made, server, 1)


@pytest.mark.parametrize("operation", ["begin", "receive", "commit"])
def test_a_refusal_keeps_its_text_and_the_version(operation: str) -> None:
    made, server = started()
    server.script[operation] = RolloutError("unknown name 'x'", where=f"operation {operation!r}")
    with pytest.raises(WeightSyncError, match="unknown name 'x'") as caught:
        sync(made, 1)
    assert caught.value.where == f"operation {operation!r}"
    assert made.policy_version == 0
    made.abort_sync()
    # Of a sync that was begun; the server takes nothing back that it has not committed.
    assert server.operations[-1] == ("abort", {"undo": operation != "begin"})


def test_an_abort_after_the_commit_undoes_it_and_only_once() -> None:
    made, server = started()
    sync(made, 1)
    made.abort_sync()
    assert server.operations[-1] == ("abort", {"undo": True})
    assert made.policy_version == 0
    made.abort_sync()
    assert server.operations[-1] == ("abort", {"undo": False})


def test_a_refused_sync_does_not_undo_the_one_before() -> None:
    made, server = started()
    sync(made, 1)
    server.script["begin"] = RolloutError("unknown name 'x'")
    with pytest.raises(WeightSyncError, match="unknown name"):
        made.begin_sync(offer())
    server.script["abort"] = {"version": 1, "invalid": None}
    made.abort_sync()
    assert server.operations[-1] == ("abort", {"undo": False})
    assert samples(made, server, 1)


def test_after_an_abort_the_engine_holds_what_the_server_says() -> None:
    made, server = started()
    sync(made, 1)
    server.script["abort"] = {"version": 0, "invalid": "the weights of version 0 are overwritten"}
    made.abort_sync()
    with pytest.raises(RolloutError, match=r"holds 0 \(the weights of version 0 are overwritten\)"):
        made.generate(requests_for())
    sync(made, 1)
    assert samples(made, server, 1)


def test_an_abort_that_is_not_answered_leaves_no_usable_weights() -> None:
    made, server = started()
    sync(made, 1)
    server.script["abort"] = RolloutError("ranks hold different weights")
    with pytest.raises(WeightSyncError, match="ranks hold different weights"):
        made.abort_sync()
    assert not samples(made, server, 0)
    assert not samples(made, server, 1)


def test_a_commit_whose_answer_was_lost_is_not_sampled_with_as_the_version_before() -> None:
    """The server may have adopted the version. It counts as gone from then on, and is not waited for again."""
    made, server = started()
    server.script["commit"] = ServerUnreachableError("no answer in time")
    with pytest.raises(WeightSyncError, match="no answer in time"):
        sync(made, 1)
    asked = len(server.operations)
    with pytest.raises(WeightSyncError, match="no answer in time"):
        made.abort_sync()
    assert len(server.operations) == asked
    assert not samples(made, server, 0)
    assert "no answer in time" in (made.problem() or "")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_under_full_sync_released_weights_are_gone_until_a_whole_sync() -> None:
    made, server = started()
    made.release()
    assert not samples(made, server, 0)
    made.resume(weights_only=True)
    made.resume()
    assert not samples(made, server, 0)
    assert server.operations == [
        ("release", {"sync_mode": "full"}),
        ("resume", {"weights_only": True}),
        ("resume", {"weights_only": False}),
    ]
    sync(made, 1)
    assert samples(made, server, 1)


def test_under_adapter_sync_released_weights_come_back() -> None:
    made, server = started(sync_mode="adapter")
    made.release()
    made.resume()
    assert server.operations[0] == ("release", {"sync_mode": "adapter"})
    assert samples(made, server, 0)


@pytest.mark.parametrize("operation", ["release", "resume"])
def test_a_hand_over_that_fails_raises(operation: str) -> None:
    made, server = started()
    server.script[operation] = RolloutError("no memory")
    with pytest.raises(RolloutError, match="no memory"):
        getattr(made, operation)()


def test_state_and_checksum_are_the_servers() -> None:
    made, server = started()
    server.script["state"] = {"version": 0, "released": []}
    assert made.state() == {"version": 0, "released": []}
    assert made.weights_checksum() == "sum of transformer"

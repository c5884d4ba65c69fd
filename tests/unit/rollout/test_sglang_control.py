"""The plug-in's own requests inside the worker, and the guard around every forward."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import fake_sglang
import pytest
import torch
from fake_sglang import (
    LORA,
    WIDTH,
    OutputBatch,
    ServerTransformer,
    World,
    fill,
    plain_transformer,
    server_transformer,
    wire_tensors,
)
from tiny_sync import CPU, buckets_of, offer_of, write
from torch import Tensor, nn

from relax_sdk.protocols import AdapterConfig
from relax_sdk.rollout.sglang.server_side.control import WorkerControl, answer_control, guard_forward
from relax_sdk.rollout.sglang.session import CONTROL_FORMAT, RECIPE_KEY
from relax_sdk.weights import SendBuffer, combine_checksums


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = fake_sglang.install(monkeypatch)
    made.modules = {"transformer": server_transformer(plain_transformer()), "vae": nn.Linear(3, 3)}
    return made


@pytest.fixture
def worker(world: World) -> Any:
    dropped: list[str] = []
    return types.SimpleNamespace(
        pipeline="the pipeline", rank=0, _drop_breakable_cuda_graphs=dropped.append, dropped=dropped
    )


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("stock code ran")


def request(text: str, load_format: str = CONTROL_FORMAT) -> Any:
    return types.SimpleNamespace(load_format=load_format, serialized_named_tensors=[text])


def ask(worker: Any, op: str, **values: Any) -> dict[str, Any]:
    """One operation; the answer, whose transport must be a success in any case."""
    done, message = answer_control(refuse, worker, request(json.dumps({"op": op, **values})))
    assert done is True
    answer: dict[str, Any] = json.loads(message)
    return answer


def sync(worker: Any, tensors: Mapping[str, Tensor], version: int, adapter: AdapterConfig | None = None) -> Any:
    """A whole sync through JSON; the answer to the commit."""
    parts = buckets_of(tensors, 4)
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        offer = offer_of(tensors, [buffer.handle], adapter)
        assert ask(worker, "begin", offer=offer.model_dump(mode="json")) == {"ok": True}
        for bucket, content in parts:
            write(buffer, bucket.slot, content)
            assert ask(worker, "receive", bucket=bucket.model_dump(mode="json")) == {"ok": True}
        answer = ask(worker, "commit", policy_version=version)
    assert answer == {"ok": True, "checksum": combine_checksums([bucket.checksum for bucket, _ in parts])}
    return answer


IDLE = {"ok": True, "session": "", "version": 0, "invalid": None, "released": [], "lora_calls": {}}
"""The state of a server that nobody started."""


def lora_tensors() -> dict[str, Tensor]:
    shapes = {"A": (LORA.rank, WIDTH), "B": (WIDTH, LORA.rank)}
    made = {
        f"blocks.{block}.{target}.lora_{half}.weight": torch.empty(shape)
        for block in range(2)
        for target in LORA.target_modules
        for half, shape in shapes.items()
    }
    fill(made.values(), seed=4)
    return made


# --- operations -------------------------------------------------------------------------------------------------------


def test_a_sync_goes_through_json_and_drops_captured_graphs(worker: Any, world: World) -> None:
    sync(worker, wire_tensors(plain_transformer(seed=1)), 3)
    expected = server_transformer(plain_transformer(seed=1)).state_dict()
    held = world.modules["transformer"].state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert worker.dropped == ["weight sync"]
    assert ask(worker, "state") == IDLE | {"version": 3}


def test_an_abort_says_what_the_server_holds_afterwards(worker: Any) -> None:
    sync(worker, wire_tensors(plain_transformer(seed=1)), 3)
    assert ask(worker, "abort", undo=False) == {"ok": True, "version": 3, "invalid": None}
    sync(worker, wire_tensors(plain_transformer(seed=2)), 4)
    assert ask(worker, "abort", undo=True) == {
        "ok": True,
        "version": 3,
        "invalid": "the weights of version 3 are overwritten",
    }


def test_under_full_sync_a_release_gives_the_transformer_up_until_the_next_sync(worker: Any, world: World) -> None:
    vae = world.modules["vae"].weight.clone()
    freed = ask(worker, "release", sync_mode="full")
    assert freed["ok"]
    assert freed["freed_bytes"] > 0
    state = ask(worker, "state")
    assert state["released"] == ["transformer", "vae"]
    assert "version 0 were released" in state["invalid"]
    assert ask(worker, "resume", weights_only=True) == {"ok": True}
    assert ask(worker, "state")["released"] == ["vae"]
    sync(worker, wire_tensors(plain_transformer(seed=1)), 1)
    assert ask(worker, "resume", weights_only=False) == {"ok": True}
    assert ask(worker, "state") == IDLE | {"version": 1}
    assert torch.equal(world.modules["vae"].weight, vae)
    assert worker.dropped == ["weights moved", "weight sync", "weights moved"]


def test_under_adapter_sync_a_release_keeps_the_base(worker: Any, world: World) -> None:
    before = {name: tensor.clone() for name, tensor in world.modules["transformer"].named_parameters()}
    sync(worker, lora_tensors(), 1, LORA)
    ask(worker, "release", sync_mode="adapter")
    ask(worker, "resume", weights_only=False)
    assert ask(worker, "state")["invalid"] is None
    held = {name.replace(".base_layer", ""): tensor for name, tensor in world.modules["transformer"].named_parameters()}
    assert held.keys() == before.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


def test_a_full_sync_into_released_weights_is_refused(worker: Any) -> None:
    """Writing there would end the worker with a segmentation fault."""
    ask(worker, "release", sync_mode="full")
    tensors = wire_tensors(plain_transformer(seed=1))
    with SendBuffer.open(CPU, 4096) as buffer:
        answer = ask(worker, "begin", offer=offer_of(tensors, [buffer.handle]).model_dump(mode="json"))
    assert not answer["ok"]
    assert "released from device memory" in answer["error"]
    assert ask(worker, "resume", weights_only=True) == {"ok": True}
    sync(worker, tensors, 1)


def test_resume_without_a_release_is_nothing_to_do(worker: Any) -> None:
    assert ask(worker, "resume", weights_only=False) == {"ok": True}


def test_a_worker_describes_its_device_and_model(worker: Any) -> None:
    assert WorkerControl.of(worker).describe() == {"device": "cpu", "uuid": "", "modules": ["transformer", "vae"]}
    assert WorkerControl.of(worker) is WorkerControl.of(worker)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["flattened_bucket", "", None])
def test_stock_updates_are_refused(worker: Any, load_format: Any) -> None:
    done, message = answer_control(refuse, worker, request("anything", load_format))
    assert done is False
    assert "only load_format 'relax-control' is served here" in message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "JSONDecodeError"),
        ('{"op": "reload"}', "unknown operation 'reload'\n  expected: begin, receive, commit, abort, release"),
        ("{}", "unknown operation None"),
        ('{"op": "commit"}', "KeyError: 'policy_version'"),
        ('{"op": "commit", "policy_version": 1}', "no weight sync is open"),
        ('{"op": "begin", "offer": {"dtype": "float32"}}', "SyncOffer is not valid: manifest: missing"),
        ('{"op": "receive", "bucket": {"index": -1}}', "WeightBucket is not valid: index: "),
        ('{"op": "abort", "undo": true, "more": [1]}', ""),
        ("[1, 2]", "AttributeError"),
    ],
)
def test_every_failure_is_an_answer_with_its_text(worker: Any, text: str, error: str) -> None:
    done, message = answer_control(refuse, worker, request(text))
    answer = json.loads(message)
    assert done is True
    assert answer["ok"] is (error == "")
    assert answer.get("error", "").startswith(error)


@pytest.mark.parametrize("error", [IndexError("a bug"), AssertionError("a bug"), MemoryError("a bug")])
def test_an_unexpected_error_is_an_answer_too(worker: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A rank that raised instead would leave the others waiting in the exchange of outcomes."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(WorkerControl, "_state", fail)
    assert ask(worker, "state") == {"ok": False, "error": f"{type(error).__name__}: a bug"}


def test_an_interrupt_is_not_an_answer(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerControl, "_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(worker, "state")


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """An engine of two ranks: this one, and another that answers what the test says (over this one's answer)."""
    world.world_size = 2
    other: dict[str, Any] = {}

    def gather(outcomes: list[Any], outcome: dict[str, Any], *, group: object) -> None:
        assert group is world.cpu_group
        outcomes[:] = [outcome, {**outcome, **other}]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return other.update


def test_an_operation_succeeds_when_it_did_on_every_rank(
    worker: Any, other_rank: Callable[[dict[str, Any]], None]
) -> None:
    assert ask(worker, "abort", undo=False) == {"ok": True, "version": 0, "invalid": None}
    # memory is a rank's own business
    other_rank({"free_bytes": 1})
    assert ask(worker, "state")["ok"] is True
    other_rank({"ok": False, "error": "no room"})
    assert ask(worker, "abort", undo=False) == {"ok": False, "error": "rank 1: no room"}


@pytest.mark.parametrize("held", [{"version": 1}, {"invalid": "partly written"}])
def test_ranks_that_hold_different_weights_do_not_agree(
    held: dict[str, Any], worker: Any, other_rank: Callable[[dict[str, Any]], None]
) -> None:
    other_rank(held)
    answer = ask(worker, "abort", undo=False)
    assert answer["ok"] is False
    assert "ranks hold different weights" in answer["error"]
    assert str(next(iter(held.values()))) in answer["error"]


# --- the guard --------------------------------------------------------------------------------------------------------


def sampling(version: int = 0, **changes: Any) -> Any:
    recipe = {
        "initial_noise_seeds": [1],
        "denoise_seeds": {},
        "latent_shape": [1],
        "sde_type": "sde",
        "eta": 0.7,
        "sigmas": None,
        "policy_version": version,
    }
    return types.SimpleNamespace(extra={"diffusers_kwargs": {RECIPE_KEY: {**recipe, **changes}}})


def forward_through(world: World) -> Callable[..., OutputBatch]:
    """A forward that runs the transformer."""

    def forward(worker: Any, batch: list[Any], *args: Any, **named: Any) -> OutputBatch:
        x = torch.zeros(1, WIDTH)
        with torch.no_grad():
            world.modules["transformer"](x)
        return OutputBatch(output=(args, named))

    return forward


def test_a_request_for_the_weights_in_place_goes_through(worker: Any, world: World) -> None:
    result = guard_forward(forward_through(world), worker, [sampling(), sampling()], True, defer_finalize=True)
    assert (result.error, result.output) == (None, ((True,), {"defer_finalize": True}))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([types.SimpleNamespace(extra={})], "a request without a recipe"),
        ([sampling(), types.SimpleNamespace(extra={})], "a request without a recipe"),
        ([sampling(1)], "the request is for policy version 1\n  expected: 0"),
        ([sampling(), sampling(1)], "policy version 1"),
        ([sampling(initial_noise_seeds=[])], "recipe has 0 start seeds"),
        ([sampling(policy_version="new")], "invalid literal for int"),
        ([sampling(surplus=1)], "recipe has .*surplus"),
    ],
)
def test_a_request_that_must_not_be_sampled_is_answered_with_an_error(worker: Any, batch: list[Any], text: str) -> None:
    result = guard_forward(refuse, worker, batch)
    assert isinstance(result, OutputBatch)
    assert result.error is not None
    assert result.error.startswith("relax-sdk: ")
    assert re.search(text, result.error)


def test_released_weights_are_not_sampled_with(worker: Any) -> None:
    ask(worker, "release", sync_mode="adapter")
    result = guard_forward(refuse, worker, [sampling()])
    assert result.error == "relax-sdk: released from device memory: ['transformer', 'vae']"
    ask(worker, "resume", weights_only=True)
    assert "['vae']" in guard_forward(refuse, worker, [sampling()]).error
    ask(worker, "resume", weights_only=False)
    assert guard_forward(lambda *_: OutputBatch(), worker, [sampling()]).error is None


def test_an_unfinished_sync_is_not_sampled_with(worker: Any) -> None:
    parts = buckets_of(wire_tensors(plain_transformer(seed=1)), 4)
    tensors = wire_tensors(plain_transformer(seed=1))
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        ask(worker, "begin", offer=offer_of(tensors, [buffer.handle]).model_dump(mode="json"))
        assert guard_forward(refuse, worker, [sampling()]).error == "relax-sdk: a weight sync is open"
        write(buffer, 0, parts[0][1])
        ask(worker, "receive", bucket=parts[0][0].model_dump(mode="json"))
        ask(worker, "abort", undo=False)
    assert "partly those of an unfinished sync" in guard_forward(refuse, worker, [sampling()]).error


def test_a_lora_layer_that_a_forward_passes_by_is_an_error(worker: Any, world: World) -> None:
    sync(worker, lora_tensors(), 1, LORA)
    forward = forward_through(world)
    assert guard_forward(forward, worker, [sampling(1)]).error is None
    transformer = world.modules["transformer"]
    assert isinstance(transformer, ServerTransformer)
    # as a fast path that reads the weights of the layer would
    attention = transformer.blocks[1].attn
    wrapped, attention.to_q = attention.to_q, attention.to_q.base_layer
    result = guard_forward(forward, worker, [sampling(1)])
    assert result.error == "relax-sdk: 1 LoRA layers were passed by (first: 'blocks.1.attn.to_q')"
    attention.to_q = wrapped
    assert guard_forward(forward, worker, [sampling(1)]).error is None


def test_a_forwards_own_error_is_passed_on(worker: Any) -> None:
    sync(worker, lora_tensors(), 1, LORA)
    result = guard_forward(lambda *_: OutputBatch(error="out of memory"), worker, [sampling(1)])
    assert result.error == "out of memory"

"""What the server side imports of SGLang, as small modules in ``sys.modules``, and a transformer with its layers.

Each stand-in does what its name says and nothing more; SGLang itself is not needed, and is hidden where it is there.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
from tiny_family import CHANNELS, TOKENS, TinyAdapter
from tiny_requests import tiny_requests
from tiny_sync import CPU, buckets_of, offer_of, write
from torch import Tensor, nn
from torch.nn import functional

from relax_sdk.protocols import AdapterConfig, RolloutRequest
from relax_sdk.rollout.sglang.client import SGLangClient
from relax_sdk.rollout.sglang.session import RECIPE_KEY
from relax_sdk.weights import SendBuffer, combine_checksums

_RUNTIME = "sglang.multimodal_gen.runtime"
WIDTH = 12
TARGETS = ("attn.to_q", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_out.0")
LORA = AdapterConfig(rank=3, alpha=6.0, target_modules=TARGETS)


@dataclasses.dataclass
class World:
    """What the fakes were told, and what they were asked."""

    world_size: int = 1
    cpu_group: object = "the cpu group"
    modules: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    forgotten: int = 0
    registered: dict[str, Any] = dataclasses.field(default_factory=dict)
    patched: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class OutputBatch:
    error: str | None = None
    output: Any = None


def install(monkeypatch: pytest.MonkeyPatch) -> World:
    """Put the fakes in place until the test ends."""
    world = World()

    def forget() -> None:
        world.forgotten += 1

    registry = types.SimpleNamespace(
        register=lambda target, hook, kind: world.registered.__setitem__(target, (hook, kind)), _patched=world.patched
    )
    contents: dict[str, dict[str, Any]] = {
        "loader.utils": {"get_param_names_mapping": names_mapping},
        "cache.conditioning": {"invalidate_conditioning_caches": forget},
        "distributed": {
            "get_local_torch_device": lambda: CPU,
            "get_tp_world_size": lambda: 1,
            "get_world_group": lambda: world,
        },
        "post_training.weights_updater": {"get_updatable_modules": lambda pipeline: dict(world.modules)},
        "pipelines_core.schedule_batch": {"OutputBatch": OutputBatch},
        "platforms.plugins": {"HookRegistry": registry, "HookType": types.SimpleNamespace(AROUND="around")},
    }
    for path, values in contents.items():
        name = f"{_RUNTIME}.{path}"
        while name:
            module = types.ModuleType(name)
            if name == f"{_RUNTIME}.{path}":
                module.__dict__.update(values)
            monkeypatch.setitem(sys.modules, name, module)
            name = name.rpartition(".")[0]
    return world


def names_mapping(rules: Mapping[str, Any]) -> Callable[[str], tuple[str, int | None, int | None]]:
    """The first rule that matches renames; a rule may say which of how many row blocks the name stands for."""

    def mapped(name: str) -> tuple[str, int | None, int | None]:
        for pattern, target in rules.items():
            if re.match(pattern, name):
                text, part, parts = target if isinstance(target, tuple) else (target, None, None)
                return re.sub(pattern, text, name), part, parts
        return name, None, None

    return mapped


# --- a transformer as SGLang builds it, and the same as the trainer has it --------------------------------------------


class ServerLinear(nn.Module):
    """Returns ``(output, None)``; ``calls`` counts."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False)
        self.quant_method = "none"

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight, self.bias), None


class ServerAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = ServerLinear(WIDTH, WIDTH)
        self.to_added_qkv = ServerLinear(3 * WIDTH, WIDTH)
        self.to_out = nn.ModuleList([ServerLinear(WIDTH, WIDTH)])
        self.norm_q = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added, _ = self.to_added_qkv(x)
        first, second, third = added.chunk(3, dim=-1)
        hidden, _ = self.to_q(self.norm_q(x))
        out, _ = self.to_out[0](hidden * torch.tanh(first) + second * torch.sigmoid(third))
        return out


class PlainAttention(nn.Module):
    """The same computation with one layer per projection."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.add_q_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.add_k_proj, self.add_v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.norm_q = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.add_q_proj(x), self.add_k_proj(x), self.add_v_proj(x)
        return self.to_out[0](self.to_q(self.norm_q(x)) * torch.tanh(first) + second * torch.sigmoid(third))


class _Transformer(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.attn = attention()
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.attn(x)
        return x


class ServerTransformer(_Transformer):
    """One fused parameter per block, with renaming rules of the shape that Qwen-Image's configuration has."""

    param_names_mapping: Mapping[str, Any] = {
        rf"^(.*\.attn)\.add_{part}_proj\.(.+)$": (r"\1.to_added_qkv.\2", index, 3) for index, part in enumerate("qkv")
    }

    def __init__(self) -> None:
        super().__init__(ServerAttention)
        self.refreshed = 0

    def refresh_weight_derived_caches(self, *, weights_path: str | None) -> None:
        assert weights_path is None
        self.refreshed += 1


def plain_transformer(seed: int = 0) -> nn.Module:
    made = _Transformer(PlainAttention)
    fill(made.parameters(), seed)
    return made


def fill(tensors: Any, seed: int, scale: float = 0.4) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))


def server_transformer(plain: nn.Module) -> ServerTransformer:
    """SGLang's layout of a plain transformer's weights, put together by hand."""
    made, source = ServerTransformer(), plain.state_dict()
    for name, parameter in made.named_parameters():
        if ".to_added_qkv." in name:
            whole = torch.cat([source[name.replace("to_added_qkv", f"add_{part}_proj")] for part in "qkv"])
        else:
            whole = source[name]
        parameter.data = whole.detach().clone()
    return made


def wire_tensors(plain: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in plain.named_parameters()}


# --- a sync by hand ---------------------------------------------------------------------------------------------------


def sync(
    receiver: Any, tensors: Mapping[str, Tensor], version: int, *, adapter: AdapterConfig | None = None, each: int = 4
) -> tuple[str, str]:
    """A whole sync into a `WeightReceiver`; its checksum, and that of what was sent."""
    held = partial_sync(receiver, tensors, adapter=adapter, each=each, commit=version)
    sent = combine_checksums([bucket.checksum for bucket, _ in buckets_of(tensors, each)])
    assert held is not None
    return held, sent


def partial_sync(
    receiver: Any,
    tensors: Mapping[str, Tensor],
    *,
    adapter: AdapterConfig | None = None,
    each: int = 4,
    buckets: int | None = None,
    commit: int | None = None,
    corrupt: bool = False,
) -> str | None:
    """Begin, and send the first ``buckets`` buckets, the last of them damaged with ``corrupt``."""
    parts = buckets_of(tensors, each)
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        receiver.begin(offer_of(tensors, [buffer.handle], adapter))
        chosen: Sequence[Any] = parts[:buckets]
        for index, (bucket, content) in enumerate(chosen):
            if corrupt and index == len(chosen) - 1:
                content = bytes([content[0] ^ 1]) + content[1:]
            write(buffer, bucket.slot, content)
            receiver.receive(bucket)
        return None if commit is None else receiver.commit(commit)


# --- the sampler ------------------------------------------------------------------------------------------------------


class Controller:
    """The state of a rollout controller that the hooks read; stock steps are recorded, not computed."""

    def __init__(self, latents_shape: Sequence[int], *, sigmas: Sequence[float], steps: Sequence[int] | None) -> None:
        self.latents_shape = tuple(latents_shape)
        self.sde_step_indices = None if steps is None else list(steps)
        self.noise_level, self.sigma_max, self.sde_type = 0.7, sigmas[1], "sde"
        self.debug_mode = self.log_prob_no_const = False
        self.noise_buffer: Tensor | None = None
        self.sums: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.share: slice = slice(None)
        """The tokens that this rank holds."""

    def shard_for_sp(self, batch: Any, noise: Tensor) -> Tensor:
        return noise[:, self.share]

    def append_local_rollout_log_probs(self, log_prob_sum: Tensor, log_prob_count: Tensor) -> None:
        self.sums.append(log_prob_sum)
        self.counts.append(log_prob_count)


# --- the HTTP side ----------------------------------------------------------------------------------------------------


class ServedAdapter(TinyAdapter):
    """The tiny family, as if SGLang served it: the text is one vector of its bytes' mean."""

    sglang_model_id = "Tiny"
    sglang_sampling_params: Mapping[str, Any] = types.MappingProxyType({"max_sequence_length": 30})

    def conditions_from_sglang(self, pos_cond_kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"encoder_hidden_states": pos_cond_kwargs["encoder_hidden_states"][0].float()}

    def sglang_text_was_cut(self, conditions: Mapping[str, Tensor]) -> bool:
        return len(conditions["encoder_hidden_states"]) >= 30


def requests_for(
    *,
    count: int = 3,
    steps: tuple[int, ...] = (1, 3),
    version: int = 0,
    prompts: Sequence[str] = ("red",),
    **sampling: Any,
) -> list[RolloutRequest]:
    return tiny_requests(ServedAdapter(), prompts, count=count, version=version, steps=steps, **sampling)


def outputs_for(request: RolloutRequest, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """What a server would answer for a group, decoded: x_T of the recipe, anything of the right shape after it."""
    assert request.sigmas is not None
    plan, steps = request.plan, request.num_inference_steps
    outputs = []
    for index, seed in enumerate(plan.initial_noise_seeds):
        start = torch.randn(request.latent_shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        later = torch.randn(steps, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(index))
        log_probs = torch.zeros(steps)
        log_probs[list(plan.sde_indices)] = -1.0 - index
        sigmas = torch.tensor(request.sigmas)
        outputs.append(
            {
                "generated_output": torch.full((3, 1, request.height, request.width), 0.25 * (index + 1)),
                "rollout_log_probs": log_probs,
                "denoising_env": {"pos_cond_kwargs": {"encoder_hidden_states": [torch.ones(len(plan.prompt), 2)]}},
                "dit_trajectory": {
                    "latents": torch.cat([start.flatten(1).T[None], later.to(dtype)]),
                    "timesteps": torch.cat([1000 * sigmas[:-1], 1000 * sigmas[-2:-1]]),
                    "sigmas": sigmas,
                },
            }
        )
    return outputs


def enveloped(value: Any) -> Any:
    """Tensors as SGLang sends them."""
    if isinstance(value, Tensor):
        data = safetensors.torch.save({"t": value.contiguous()})
        return {"__tensor__": True, "data": data, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {key: enveloped(item) for key, item in value.items()}
    return [enveloped(item) for item in value] if isinstance(value, list) else value


def answering(requests: list[RolloutRequest]) -> Any:
    """Answer for exactly the candidates whose seeds a request carries."""
    by_seed = {
        seed: output
        for request in requests
        for seed, output in zip(request.plan.initial_noise_seeds, outputs_for(request), strict=True)
    }

    def answer(body: Mapping[str, Any]) -> Any:
        recipe = body["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY]
        assert body["num_outputs_per_prompt"] == len(recipe["initial_noise_seeds"])
        return enveloped([by_seed[seed] for seed in recipe["initial_noise_seeds"]])

    return answer


class FakeClient(SGLangClient):
    """Answers from a script; an exception is raised, anything else returned. Keeps what it was asked."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__(port=1, timeout_s=1)
        self._server = server

    def generate(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._server.bodies.append(body)
        return msgpack.unpackb(msgpack.packb(self._server.reply("generate", body)))

    def control(self, operation: str, **values: Any) -> dict[str, Any]:
        self._server.operations.append((operation, values))
        answer = self._server.reply(operation, values)
        return {} if answer is None else answer

    def weights_checksum(self, module: str) -> str:
        return f"sum of {module}"


class FakeServer:
    """Takes the place of `ServerProcess`."""

    made: list[FakeServer]

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.bodies: list[Mapping[str, Any]] = []
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.script: dict[str, Any] = {"state": {"session": str(arguments["folder"])}}
        self.ended: str | None = None
        self.ends_later: str | None = None
        self.stops = 0
        self.made.append(self)

    def reply(self, name: str, asked: Any) -> Any:
        answer = self.script.get(name)
        if isinstance(answer, BaseException):
            raise answer
        return answer(asked) if callable(answer) else answer

    def start(self, *, limit_s: float) -> FakeClient:
        return FakeClient(self)

    def problem(self) -> str | None:
        return self.ended

    def wait_problem(self, *, limit_s: float) -> str | None:
        self.ended = self.ends_later
        return self.ended

    def tail(self) -> str:
        return "  | the last line"

    def stop(self) -> None:
        self.stops += 1

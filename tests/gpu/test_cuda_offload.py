"""Offload on a CUDA device: what the allocator and the driver say is free, pinned host memory, bitwise return."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from relax_sdk.training import StorageOffload

pytestmark = pytest.mark.gpu(1)

WIDTH, BLOCKS = 2048, 8
MB = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """The first device, with a process group of this process alone."""
    here = torch.device("cuda", 0)
    torch.cuda.set_device(here)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield here
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.nn.functional.gelu(self.up(x)))


class Policy:
    """A sharded stack with an optimizer: about 1 GiB of float32 weights, three times that with its moments."""

    def __init__(self, device: torch.device, *, reshard: bool) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cuda", (1,))
        for part in (*self.module, self.module):
            fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
        self.module.to(device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.held = StorageOffload(self.module, self.optimizer, device=device)
        self.device = device

    def step(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(16, WIDTH, device=self.device, generator=generator)
        with torch.no_grad():
            self.module(x)
        self.module(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        with torch.no_grad():
            return [
                tensor.to_local() if hasattr(tensor, "to_local") else tensor
                for tensor in (*self.module.parameters(), *self.module.buffers(), *states)
            ]


@pytest.mark.parametrize("reshard", [True, False])
def test_the_device_is_empty_in_between_and_all_comes_back(device: torch.device, reshard: bool) -> None:
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    policy = Policy(device, reshard=reshard)
    policy.step(0)
    before = [tensor.cpu() for tensor in policy.tensors()]
    assert torch.cuda.memory_allocated(device) > allocated + 3000 * MB
    driver_before, _ = torch.cuda.mem_get_info(device)
    freed = policy.held.offload()
    driver_after, _ = torch.cuda.mem_get_info(device)
    assert freed > 3000 * MB
    # What stays is not the policy's: the matrix library's workspace.
    assert torch.cuda.memory_allocated(device) - allocated < 100 * MB
    assert torch.cuda.memory_reserved(device) - reserved < 200 * MB
    assert driver_after - driver_before > 3000 * MB
    assert all(block.is_pinned() for block in policy.held._host.blocks)
    policy.held.wake()
    for got, want in zip(policy.tensors(), before, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("reshard", [True, False])
def test_training_goes_on_as_if_nothing_had_happened(device: torch.device, reshard: bool) -> None:
    ends = []
    for pause in (False, True):
        policy = Policy(device, reshard=reshard)
        for seed in range(3):
            if pause:
                policy.held.offload()
                policy.held.wake()
            policy.step(seed)
        policy.held.offload()
        policy.held.wake()
        ends.append([tensor.cpu() for tensor in policy.tensors()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_neither_side_grows(device: torch.device) -> None:
    policy = Policy(device, reshard=True)
    policy.step(0)
    hosts, devices = [], []
    for _ in range(10):
        policy.held.offload()
        hosts.append(policy.held.host_bytes)
        devices.append(torch.cuda.memory_allocated(device))
        policy.held.wake()
    assert len(set(hosts)) == len(set(devices)) == 1
    assert hosts[0] < 1.05 * sum(tensor.nbytes for tensor in policy.tensors())

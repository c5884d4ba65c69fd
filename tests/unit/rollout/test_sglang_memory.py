"""Device memory inside the server, on a CPU: what is released is free, and what comes back is the same bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_sdk.errors import RolloutError
from relax_sdk.rollout.sglang.server_side.memory import DeviceMemory
from relax_sdk.weights import HostBlocks

CPU = torch.device("cpu")


@pytest.fixture
def modules() -> dict[str, nn.Module]:
    """Three modules: a strided weight, an empty parameter and a buffer among them."""
    torch.manual_seed(0)
    vae = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    vae.register_buffer("mean", torch.randn(3))
    vae.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return {"transformer": nn.Linear(16, 8).bfloat16(), "text_encoder": nn.Embedding(20, 4), "vae": vae}


def snapshot(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    return {
        f"{name}.{key}": (parameter.detach().clone(), parameter.stride())
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def assert_same(modules: Mapping[str, nn.Module], before: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    after = snapshot(modules)
    assert after.keys() == before.keys()
    for name, (tensor, stride) in before.items():
        assert torch.equal(after[name][0], tensor), name
        assert after[name][1] == stride, name


def stored(modules: Mapping[str, nn.Module]) -> int:
    """Bytes that the parameters' storages hold, each storage once."""
    storages = {
        storage._cdata: storage.nbytes()
        for module in modules.values()
        for storage in [parameter.untyped_storage() for parameter in module.parameters()]
    }
    return sum(storages.values())


def test_a_release_frees_every_parameter_and_a_resume_brings_it_back(modules: dict[str, nn.Module]) -> None:
    before, size = snapshot(modules), stored(modules)
    memory = DeviceMemory(modules, device=CPU)
    assert memory.released == frozenset()
    assert memory.release() == size > 0
    assert stored(modules) == 0
    assert memory.released == {"transformer", "text_encoder", "vae"}
    assert memory.resume() == []
    assert memory.released == frozenset()
    assert_same(modules, before)
    assert modules["vae"].weight.is_contiguous(memory_format=torch.channels_last)


def test_parameter_objects_and_buffers_are_the_same_ones_all_along(modules: dict[str, nn.Module]) -> None:
    parameters = {name: list(module.parameters()) for name, module in modules.items()}
    mean = modules["vae"].mean
    alias = modules["transformer"].weight.detach()[:4]
    expected = alias.clone()
    memory = DeviceMemory(modules, device=CPU)
    memory.release()
    assert torch.equal(modules["vae"].mean, mean.clone())
    memory.resume()
    for name, module in modules.items():
        assert all(one is two for one, two in zip(module.parameters(), parameters[name], strict=True))
    # whoever else held a view of a parameter sees it again
    assert torch.equal(alias, expected)


def copies_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the copies to host memory from now on."""
    copied: list[int] = []
    plain = HostBlocks.copy

    def counted(self: HostBlocks, storage: torch.UntypedStorage, size: int, place: int, *, to_host: bool) -> None:
        copied.extend([size] if to_host else [])
        plain(self, storage, size, place, to_host=to_host)

    monkeypatch.setattr(HostBlocks, "copy", counted)
    return copied


def test_three_cycles_copy_once_and_keep_what_was_copied(
    modules: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(modules)
    copied = copies_out(monkeypatch)
    memory = DeviceMemory(modules, device=CPU)
    for _ in range(3):
        memory.release()
        memory.resume()
        assert_same(modules, before)
    assert sum(copied) == stored(modules)


def test_a_second_release_or_resume_does_nothing(modules: dict[str, nn.Module]) -> None:
    before = snapshot(modules)
    memory = DeviceMemory(modules, device=CPU)
    memory.release()
    assert memory.release() == 0
    memory.resume()
    modules["transformer"].weight.data.fill_(7)
    assert memory.resume() == []
    assert bool((modules["transformer"].weight == 7).all()), "what is in is not filled again"
    assert before.keys() == snapshot(modules).keys()


def test_a_disposable_module_comes_back_without_a_copy_and_is_named(
    modules: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, copied = snapshot(modules), copies_out(monkeypatch)
    memory = DeviceMemory(modules, device=CPU, disposable=["transformer"])
    size = stored({"text_encoder": modules["text_encoder"], "vae": modules["vae"]})
    memory.release()
    assert sum(copied) == size > 0
    assert memory.resume() == ["transformer"]
    assert modules["transformer"].weight.shape == (8, 16)
    modules["transformer"].weight.data.zero_()  # there is memory to write to
    rest = {name: module for name, module in modules.items() if name != "transformer"}
    assert_same(rest, {name: value for name, value in before.items() if not name.startswith("transformer")})


def test_modules_come_back_by_name(modules: dict[str, nn.Module]) -> None:
    before = snapshot(modules)
    memory = DeviceMemory(modules, device=CPU)
    memory.release()
    memory.resume(["transformer"])
    assert memory.released == {"text_encoder", "vae"}
    assert stored(modules) == stored({"transformer": modules["transformer"]}) > 0
    assert modules["vae"].weight.untyped_storage().nbytes() == 0
    # a release now takes what is in, and nothing twice
    assert memory.release() == 16 * 8 * 2 + 8 * 2
    memory.resume(["transformer"])
    memory.resume()
    assert_same(modules, before)


def test_an_unknown_module_is_refused_and_nothing_moves(modules: dict[str, nn.Module]) -> None:
    memory = DeviceMemory(modules, device=CPU)
    memory.release()
    with pytest.raises(
        RolloutError, match=r"no modules \['transformers'\]\n.*\['text_encoder', 'transformer', 'vae'\]"
    ):
        memory.resume(["transformer", "transformers"])
    assert memory.released == {"transformer", "text_encoder", "vae"}


@pytest.mark.parametrize("disposable", [[], ["one"]])
def test_tied_parameters_stay_tied(disposable: list[str]) -> None:
    """Two modules that share a parameter, and one that holds two views of one storage."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    whole = torch.randn(2, 4)
    two.first, two.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    modules = {"one": one, "two": two}
    before = snapshot(modules)
    memory = DeviceMemory(modules, device=CPU, disposable=disposable)
    assert memory.release() == 4 * 16 + 4 * 4 + 4 * 4 + 2 * 4 * 4
    memory.resume()
    if not disposable:
        assert_same(modules, before)
    assert two.weight is one.weight
    assert two.first.untyped_storage()._cdata == two.second.untyped_storage()._cdata
    assert torch.equal(two.second, before["two.second"][0])


def mapped_parameters(path: Path, values: Tensor, *, columns: int = 4) -> list[nn.Parameter]:
    """Rows of ``values``, all views of one mapped file, as a loader that maps a checkpoint leaves them."""
    path.write_bytes(values.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=values.numel() * 4)
    assert not storage.resizable()
    whole = torch.empty(0, dtype=torch.float32).set_(storage, 0, values.shape)
    return [nn.Parameter(row, requires_grad=False) for row in whole]


def test_parameters_mapped_from_a_file_are_released_too(tmp_path: Path) -> None:
    values = torch.randn(3, 4)
    module = nn.ParameterList(mapped_parameters(tmp_path / "weights", values))
    content = (tmp_path / "weights").read_bytes()
    memory = DeviceMemory({"transformer": module}, device=CPU)
    assert memory.release() == values.numel() * 4
    assert {parameter.untyped_storage().nbytes() for parameter in module} == {0}
    memory.resume()
    assert torch.equal(torch.stack(list(module)), values)
    module[0].fill_(1.0)
    assert (tmp_path / "weights").read_bytes() == content


def test_a_mapped_file_is_copied_once_whatever_the_number_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    clone = torch.UntypedStorage.clone

    def counted(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copies.append(storage.nbytes())
        return clone(storage)

    module = nn.ParameterList(mapped_parameters(tmp_path / "weights", torch.randn(6, 4)))
    monkeypatch.setattr(torch.UntypedStorage, "clone", counted)
    DeviceMemory({"transformer": module}, device=CPU)
    assert copies == [6 * 4 * 4]


def test_a_copy_that_fails_frees_nothing(modules: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(modules)
    memory = DeviceMemory(modules, device=CPU)

    def full(*_: Any) -> None:
        raise MemoryError("no host memory")

    with monkeypatch.context() as patched:
        patched.setattr(HostBlocks, "reserve", full)
        with pytest.raises(RolloutError, match="could not be copied to host memory: no host memory"):
            memory.release()
    assert memory.released == frozenset()
    assert_same(modules, before)


def test_a_device_without_room_is_an_error_and_the_module_stays_out(
    modules: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(modules, device=CPU)
    memory.release()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no device memory")

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(RolloutError, match="could not take its device memory again: no device memory"):
        memory.resume()
    assert memory.released == {"transformer", "text_encoder", "vae"}


def test_modules_on_another_device_are_left_alone() -> None:
    module = nn.Linear(2, 2, device="meta")
    memory = DeviceMemory({"vae": module}, device=CPU)
    assert memory.release() == 0
    memory.resume()
    assert module.weight.device.type == "meta"

"""Specs: dotted paths, the check against the protocol, presets and bundled models."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_sdk.errors import ConfigError, PluginError, RecordError, UnknownNameError
from relax_sdk.protocols import EmbeddedModelAdapter, RewardScorer
from relax_sdk.registry import ModelSpec, Registry, RewardSpec
from relax_sdk.registry.conformance import conformance_problems


@pytest.mark.parametrize("path", ["dotted_adapter:Adapter", "dotted_adapter.Adapter"])
def test_a_class_may_be_named_by_its_path(site, adapter_source, path):
    site.module("dotted_adapter", adapter_source)
    spec = Registry().model(path)
    assert spec.adapter == "dotted_adapter:Adapter"
    assert spec.load().__name__ == "Adapter"


@pytest.mark.parametrize(
    ("path", "error", "expected"),
    [
        ("a b.c", ConfigError, "package.module:Class"),
        (":x", ConfigError, "package.module:Class"),
        ("no_such_module:X", PluginError, "ModuleNotFoundError"),
        ("relax_sdk.errors:RelaxErrr", PluginError, "did you mean 'RelaxError'"),
        ("json:dumps", PluginError, "expected a class"),
        ("relax_sdk.errors.RelaxError", PluginError, "missing method replay_transition(model, batch)"),
    ],
)
def test_a_path_that_leads_nowhere(path, error, expected):
    with pytest.raises(error) as caught:
        Registry().model(path).load()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def weight_name_map(self): return str", "", ["missing method weight_name_map()"]),
        (
            "(self, model, batch)",
            "(self, batch)",
            ["expected replay_transition(model, batch), came replay_transition(batch)"],
        ),
        ("*, revision, dtype", "revision, dtype", []),
        ("*, revision, dtype", "*, dtype", ["unexpected keyword argument 'revision'"]),
        ("*, revision, dtype", "*, revision, dtype, device='cpu'", []),
        ("*, revision, dtype", "*, revision, dtype, device", ["missing a required argument: 'device'"]),
        ("def artifact_tracks(self): return", "artifact_tracks =", ["artifact_tracks: expected a method"]),
        (
            'supported_tasks = ("t2i",)',
            'supported_tasks = "t2i"',
            ["supported_tasks: expected a tuple of str, came 't2i'"],
        ),
        ('family = "fake"', "", ["missing attribute family: str"]),
        ('family = "fake"', "family: str", []),
        ("def validate_sampling(self, sampling)", "@staticmethod\n    def validate_sampling(sampling)", []),
    ],
)
def test_what_does_not_fit_the_protocol_is_named(site, adapter_source, old, new, expected):
    assert old in adapter_source
    site.module("odd_adapter", adapter_source.replace(old, new))
    spec = Registry().model("odd_adapter:Adapter")
    if not expected:
        spec.load()
        return
    with pytest.raises(PluginError) as caught:
        spec.load()
    for part in expected:
        assert part in str(caught.value)


def test_every_difference_is_listed_at_once():
    problems = conformance_problems(type("Empty", (), {}), RewardScorer)
    assert problems == [
        "missing attribute components: tuple[str, ...] (declare it on the class)",
        "missing attribute required_tracks: tuple[str, ...] (declare it on the class)",
        "missing method score(batch)",
    ]
    assert len(conformance_problems(type("Empty", (), {}), EmbeddedModelAdapter)) == 2


def test_spec_and_class_may_not_contradict_each_other(site, adapter_source):
    site.module("narrow_adapter", adapter_source)
    spec = ModelSpec(name="n", adapter="narrow_adapter:Adapter", tasks=("t2i", "t2v"), plugin="n", distribution="d")
    with pytest.raises(PluginError, match="t2v"):
        spec.load()
    site.module(
        "some_scorer",
        "class S:\n  components = ('a',)\n  required_tracks = ('image',)\n  def score(self, batch): ...\n",
    )
    RewardSpec(name="r", scorer="some_scorer:S", components=("a",)).load()
    with pytest.raises(PluginError, match="declares components"):
        RewardSpec(name="r", scorer="some_scorer:S", components=("b",)).load()


def test_malformed_specs_are_refused_where_they_are_made():
    for fields in (
        {"name": "has space", "adapter": "a:B"},
        {"name": "dotted.name", "adapter": "a:B"},
        {"name": "a", "adapter": "a.B"},
        {"name": "a", "adapter": "a:B", "presets": {"tiny": "a:b"}, "default_preset": "big"},
        {"name": "a", "adapter": "a:B", "color": "red"},
    ):
        with pytest.raises(RecordError):
            ModelSpec(**fields)


def test_presets(site):
    site.module("presets", "def good(): return {'optimizer': {'lr': 1}}\ndef bad(): 1 / 0\ndef odd(): return [1]\n")
    names = ("good", "bad", "odd", "lost")
    spec = ModelSpec(name="a", adapter="a:B", presets={name: f"presets:{name}" for name in names})
    assert spec.load_preset("good") == {"optimizer": {"lr": 1}}
    for name, expected in (("bad", "ZeroDivisionError"), ("odd", "list"), ("lost", "no attribute 'lost'")):
        with pytest.raises(PluginError, match=expected):
            spec.load_preset(name)
    with pytest.raises(UnknownNameError) as caught:
        spec.load_preset("goood")
    assert caught.value.nearest == "good"


def test_bundled_model_of_a_scorer(site):
    site.module("where", "def model(): return 'x/y'\ndef lost(): raise FileNotFoundError('gone')\n")
    assert RewardSpec(name="r", scorer="a:B").default_model_path() is None
    assert RewardSpec(name="r", scorer="a:B", model_path="where:model").default_model_path() == Path("x/y")
    with pytest.raises(PluginError, match="FileNotFoundError: gone"):
        RewardSpec(name="r", scorer="a:B", model_path="where:lost").default_model_path()

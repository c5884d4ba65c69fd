"""Discovery imports nothing; each plug-in is loaded alone, and a broken one fails only who names it."""

from __future__ import annotations

import pickle
import sys

import pytest

from relax_sdk.errors import ConfigError, PluginError, UnknownNameError
from relax_sdk.registry import Registry

REWARD = """
from relax_sdk import RewardSpec, hookimpl

@hookimpl
def relax_register_rewards(register):
    register(RewardSpec(name="{name}", scorer="nowhere:Scorer"))
"""


def status_of(registry: Registry, name: str) -> list[tuple[str, str]]:
    return [(item.status, item.reason or "") for item in registry.plugins() if item.name == name]


def test_discovery_imports_no_plugin(site):
    site.plugin("quiet", "raise SystemError('imported')")
    registry = Registry.discover()
    assert "quiet_plugin" not in sys.modules
    assert [status for status, _ in status_of(registry, "quiet")] == ["broken"]


def test_the_core_registers_through_the_same_hooks():
    registry = Registry.discover()
    first = registry.plugins()[0]
    assert (first.name, first.distribution, first.status) == ("core", "relax-sdk", "ok")
    assert registry.engine("local").engine == "relax_sdk.rollout.local:LocalEngine"
    assert registry.weight_sync("stream").sync == "relax_sdk.weight_sync.stream:StreamedSync"


def test_a_model_is_found_loaded_and_pickled(site, model_plugin, adapter_source):
    site.plugin("alpha", model_plugin.format(name="alpha"))
    site.module("alpha_adapter", adapter_source)
    spec = Registry.discover().model("alpha")
    assert (spec.plugin, spec.distribution) == ("alpha", "alpha-dist")
    assert "alpha_adapter" not in sys.modules, "a spec holds import strings only"
    assert pickle.loads(pickle.dumps(spec)).load().family == "fake"


def test_an_import_failure_is_quoted_with_its_place_and_spares_the_others(site, model_plugin):
    path = site.module("bad_plugin", "\n\nimport no_such_library\n")
    site.distribution("bad-dist", {"bad": "bad_plugin"}, version="2.5")
    site.plugin("good", model_plugin.format(name="good"))
    registry = Registry.discover()
    assert registry.model("good").name == "good"
    ((status, reason),) = status_of(registry, "bad")
    assert status == "broken"
    for part in ("ModuleNotFoundError: No module named 'no_such_library'", f"{path}:3", "'bad-dist' 2.5", "bad_plugin"):
        assert part in reason
    with pytest.raises(PluginError, match="no_such_library"):
        registry.plugin("bad")
    with pytest.raises(PluginError, match="no_such_library"):
        registry.reward("bad")


def test_a_plugin_cannot_end_the_command(site):
    site.plugin("exits", "import sys\nsys.exit(7)")
    assert status_of(Registry.discover(), "exits")[0][0] == "broken"


def test_ctrl_c_during_an_import_is_not_swallowed(site):
    site.plugin("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry.discover().plugin("slow")


def test_two_distributions_with_one_name(site, model_plugin):
    site.module("twin_a", model_plugin.format(name="twin"))
    site.distribution("first-dist", {"twin": "twin_a"}, version="1.1")
    site.distribution("second-dist", {"twin": "twin_a"}, version="2.2")
    site.plugin("other", model_plugin.format(name="other"))
    registry = Registry.discover()
    assert [status for status, _ in status_of(registry, "twin")] == ["conflict", "conflict"]
    assert registry.model("other").name == "other"
    with pytest.raises(PluginError) as caught:
        registry.plugin("twin")
    for part in ("'first-dist' 1.1", "'second-dist' 2.2", "pip uninstall"):
        assert part in str(caught.value)


def test_two_plugins_with_one_reward_and_the_entry_point_that_owns_it(site):
    for name in ("east", "west"):
        site.plugin(name, REWARD.format(name="taste"))
    with pytest.raises(PluginError) as caught:
        Registry.discover().reward("taste")
    assert "'east'" in str(caught.value)
    assert "'west'" in str(caught.value)
    site.plugin("taste", REWARD.format(name="taste"))
    assert Registry.discover().reward("taste").plugin == "taste"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@hookimpl\ndef relax_register_model(register): ...", "did you mean 'relax_register_models'"),
        ("def relax_register_models(register): ...", "lacks the @hookimpl marker"),
        ("x = 1", "implements no hook"),
        ("@hookimpl\ndef relax_register_models(register, extra): ...", "extra"),
        ("@hookimpl\ndef relax_register_models(register): 1 / 0", "ZeroDivisionError"),
        ("@hookimpl\ndef relax_register_models(register): register('qwen')", "expected: a relax_sdk.ModelSpec"),
        (
            "@hookimpl\ndef relax_register_models(register): register(ModelSpec(name='a', adapter='no colon'))",
            "package.module:Name",
        ),
        (
            "@hookimpl\ndef relax_register_models(register):\n"
            "  for _ in range(2): register(ModelSpec(name='a', adapter='a:B'))",
            "twice",
        ),
        (
            "@hookimpl\ndef relax_register_engines(register): register(EngineSpec(name='local', engine='a:B'))",
            "a name of the core",
        ),
        ("relax_api_version = 2\n@hookimpl\ndef relax_register_models(register): ...", "relax_api_version = 2"),
    ],
)
def test_what_makes_a_plugin_broken(site, source, expected):
    site.plugin("broken", "from relax_sdk import EngineSpec, ModelSpec, hookimpl\n" + source)
    ((status, reason),) = status_of(Registry.discover(), "broken")
    assert status == "broken"
    assert expected in reason
    assert "'broken-dist'" in reason


def test_a_plugin_may_be_an_object_but_not_a_class(site):
    source = "from relax_sdk import hookimpl\nclass P:\n  @hookimpl\n  def relax_register_models(self, register): ...\n"
    site.module("shapes", source + "instance = P()\n")
    site.distribution("shapes-dist", {"as_object": "shapes:instance", "as_class": "shapes:P"})
    registry = Registry.discover()
    assert status_of(registry, "as_object") == [("ok", "")]
    assert "expected: a module" in status_of(registry, "as_class")[0][1]


def test_an_unknown_name_has_a_nearest_one_and_says_what_could_not_be_loaded(site, model_plugin):
    site.plugin("sunflower", model_plugin.format(name="sunflower"))
    site.plugin("wilted", "1 / 0")
    with pytest.raises(UnknownNameError) as caught:
        Registry.discover().model("sunflowr")
    assert caught.value.nearest == "sunflower"
    assert "wilted" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        Registry.discover().plugin("sunflowr")
    assert caught.value.nearest == "sunflower"


def test_the_model_of_a_plugin(site):
    source = """
    from relax_sdk import ModelSpec, hookimpl

    @hookimpl
    def relax_register_models(register):
        for name in {names!r}:
            register(ModelSpec(name=name, adapter="a:B"))
    """
    site.plugin("single", source.format(names=["whatever"]))
    site.plugin("several", source.format(names=["x", "several"]))
    site.plugin("unclear", source.format(names=["x", "y"]))
    site.plugin("rewarding", REWARD.format(name="r"))
    registry = Registry.discover()
    assert registry.plugin_model("single").name == "whatever"
    assert registry.plugin_model("several").name == "several"
    with pytest.raises(ConfigError, match="several models: x, y"):
        registry.plugin_model("unclear")
    with pytest.raises(ConfigError, match="no model"):
        registry.plugin_model("rewarding")


def test_plugins_can_be_disabled(site, model_plugin):
    site.plugin("silent", model_plugin.format(name="silent"))
    registry = Registry.discover({"RELAX_DISABLE_PLUGINS": "1"})
    assert status_of(registry, "silent") == [("disabled", "RELAX_DISABLE_PLUGINS is set")]
    assert "silent_plugin" not in sys.modules
    assert registry.engine("local").name == "local"
    assert registry.tasks() == ("t2i",)
    with pytest.raises(UnknownNameError, match="unset RELAX_DISABLE_PLUGINS"):
        registry.plugin("silent")
    assert Registry.discover({"RELAX_DISABLE_PLUGINS": "0"}).plugin("silent").status == "ok"


def test_tasks_are_what_loadable_models_declare(site):
    site.plugin(
        "moving",
        "from relax_sdk import ModelSpec, hookimpl\n@hookimpl\ndef relax_register_models(register):\n"
        "  register(ModelSpec(name='moving', adapter='a:B', tasks=('t2i', 't2v')))",
    )
    site.plugin("wrong", "1 / 0")
    assert Registry.discover().tasks() == ("t2i", "t2v")

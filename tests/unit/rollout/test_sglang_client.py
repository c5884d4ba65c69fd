"""HTTP to one server: what it says, what it does not say, and what is said when it says nothing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from fake_sglang_server import answer, answering

from relax_sdk.errors import RolloutError
from relax_sdk.rollout.sglang.client import ServerUnreachableError, SGLangClient
from relax_sdk.rollout.sglang.process import reserve_ports

GENERATE, CONTROL, CHECKSUM = "/rollout/generate", "/update_weights_from_tensor", "/get_weights_checksum"


def call(path: str, reply: dict[str, Any], ask: Callable[[SGLangClient], Any], *, timeout_s: float = 10.0) -> Any:
    with answering({path: reply}) as (port, _):
        return ask(SGLangClient(port=port, timeout_s=timeout_s))


def generate(client: SGLangClient) -> Any:
    return client.generate({"prompt": "red"})


def commit(client: SGLangClient) -> Any:
    return client.control("commit", policy_version=1)


def checksum(client: SGLangClient) -> Any:
    return client.weights_checksum("transformer")


def wrapped(message: str, *, success: bool = True) -> dict[str, Any]:
    """As SGLang's route answers: our text inside its own JSON."""
    return answer(json.dumps({"success": success, "message": message}), 200 if success else 400)


# --- answers that are there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_health_is_status_200(status: int, healthy: bool) -> None:
    assert call("/health", answer("", status), SGLangClient.healthy) is healthy


def test_nobody_there_and_nobody_answering_are_not_healthy() -> None:
    with contextlib.ExitStack() as stack:
        (port,) = reserve_ports(stack, 1)
    assert SGLangClient(port=port, timeout_s=5).healthy() is False
    assert call("/health", answer(then="hang"), lambda client: client.healthy(timeout_s=0.2)) is False


def test_generate_sends_json_and_reads_msgpack() -> None:
    items = [{"rollout_log_probs": {"__tensor__": True, "data": b"\x00\xff", "shape": [1]}, "text": "ä"}]
    with answering({GENERATE: answer(msgpack.packb(items))}) as (port, seen):
        assert SGLangClient(port=port, timeout_s=5).generate({"prompt": "ä", "seed": 2**62}) == items
    assert seen == [(GENERATE, {"prompt": "ä", "seed": 2**62})]


def test_an_operation_travels_inside_a_weight_update() -> None:
    text = json.dumps({"ok": True, "checksum": "5f"})
    with answering({CONTROL: wrapped(text)}) as (port, seen):
        assert commit(SGLangClient(port=port, timeout_s=5)) == {"checksum": "5f"}
    ((_, body),) = seen
    assert body["load_format"] == "relax-control"
    assert [json.loads(item) for item in body["serialized_named_tensors"]] == [{"op": "commit", "policy_version": 1}]


def test_a_failed_operation_raises_its_own_text() -> None:
    reply = wrapped(json.dumps({"ok": False, "error": "8 tensors came\n  expected: 22"}))
    with pytest.raises(RolloutError, match="8 tensors came\n  expected: 22\n") as caught:
        call(CONTROL, reply, commit)
    assert caught.value.where == "operation 'commit' in the SGLang server"


def test_the_checksum_of_a_module() -> None:
    with answering({CHECKSUM: answer('{"transformer": "ab12"}')}) as (port, seen):
        assert checksum(SGLangClient(port=port, timeout_s=5)) == "ab12"
    assert seen == [(CHECKSUM, {"module_names": ["transformer"]})]


# --- answers that are not what was asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (answer('{"detail": "out of memory"}', 500), r'SGLang answered 500: \{"detail": "out of memory"\}'),
        (answer("", 404), "SGLang answered 404"),
        (answer("<html>proxy</html>"), r"no msgpack \(18 bytes\)"),
        (answer(b""), r"no msgpack \(0 bytes\)"),
        (answer(b"\xc1"), "no msgpack"),
        (answer(msgpack.packb([{"a": 1}])[:-1]), "no msgpack"),
        (answer(b"\x81\x90\x01"), "no msgpack"),  # a mapping whose key is a list
        (answer(b"\x91\xa1\xff"), "no msgpack"),  # text that is no UTF-8
        (answer(msgpack.packb({"detail": "x"})), "a dict, not a list of mappings"),
        (answer(msgpack.packb(["x"])), "a list, not a list of mappings"),
    ],
)
def test_a_generate_answer_that_is_none_is_an_error(reply: dict[str, Any], text: str) -> None:
    with pytest.raises(RolloutError, match=text) as caught:
        call(GENERATE, reply, generate)
    assert not isinstance(caught.value, ServerUnreachableError)
    assert caught.value.where == "POST /rollout/generate"


def test_a_long_answer_is_quoted_in_part() -> None:
    with pytest.raises(RolloutError) as caught:
        call(GENERATE, answer("x" * 100_000, 500), generate)
    assert len(str(caught.value)) < 3000
    assert "xxx ..." in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [
        answer("Internal Server Error", 500),
        answer("{}"),
        answer("[]"),
        wrapped("only load_format 'x' is served here", success=False),
        wrapped("5"),
        wrapped("[1]"),
        wrapped('{"checksum": "5f"}'),
        wrapped('{"ok": false}'),
        answer('{"message": null}'),
    ],
)
def test_an_operations_answer_that_is_none_is_quoted(reply: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=f"SGLang answered {reply['status']}: ") as caught:
        call(CONTROL, reply, commit)
    assert "commit" in str(caught.value.where)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (answer('{"transformer": "not_found"}'), "not_found"),
        (answer('{"error": "Pipeline is not initialized"}'), "Pipeline is not initialized"),
        (answer('{"error": "x"}', 500), "answered 500"),
        (answer("nothing"), "answered 200: nothing"),
        (answer('["transformer"]'), "answered 200"),
    ],
)
def test_a_checksum_of_nothing_is_an_error(reply: dict[str, Any], text: str) -> None:
    with pytest.raises(RolloutError, match=text) as caught:
        call(CHECKSUM, reply, checksum)
    assert caught.value.where == "POST /get_weights_checksum"


# --- no answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "path"), [(generate, GENERATE), (commit, CONTROL), (checksum, CHECKSUM)], ids=["generate", "sync", "sum"]
)
def test_a_server_that_never_answers_is_named_with_the_time(ask: Callable[[SGLangClient], Any], path: str) -> None:
    started = time.monotonic()
    with pytest.raises(ServerUnreachableError, match=r"did not answer within 0\.3 s") as caught:
        call(path, answer(then="hang"), ask, timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert caught.value.where == f"POST {path}"


@pytest.mark.parametrize(
    ("then", "text"), [("close", "RemoteDisconnected"), ("cut", r"IncompleteRead.*20 bytes read, 20 more expected")]
)
def test_a_connection_that_ends_is_told_from_an_answer(then: str, text: str) -> None:
    with pytest.raises(ServerUnreachableError, match=f"no answer from SGLang: {text}"):
        call(GENERATE, answer("x" * 40, then=then), generate)


def test_nobody_there_is_unreachable() -> None:
    with contextlib.ExitStack() as stack:
        (port,) = reserve_ports(stack, 1)
    with pytest.raises(ServerUnreachableError, match="ConnectionRefusedError"):
        generate(SGLangClient(port=port, timeout_s=5))

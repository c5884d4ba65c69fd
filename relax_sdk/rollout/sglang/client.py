"""HTTP to one SGLang server on this machine: JSON out, JSON or msgpack in, a timeout on everything."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from relax_sdk.errors import RolloutError
from relax_sdk.rollout.sglang.session import CONTROL_FORMAT

__all__ = ["SGLangClient", "ServerUnreachableError"]

_LOOPBACK = "127.0.0.1"
_QUOTED = 2000
_NO_MODULE = "not_found"
"""What SGLang answers, with status 200, in place of the checksum of a module that it does not have."""


class ServerUnreachableError(RolloutError):
    """The connection failed or ended, or no answer came in time; the server may be gone."""


class SGLangClient:
    """One server's endpoints.

    Args:
        port: on the loopback interface.
        timeout_s: of one call.
    """

    def __init__(self, *, port: int, timeout_s: float) -> None:
        self._port = port
        self._timeout_s = timeout_s

    def healthy(self, *, timeout_s: float = 5.0) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            status, _ = self._call("GET", "/health", None, timeout_s=timeout_s)
        except ServerUnreachableError:
            return False
        return status == http.client.OK

    def generate(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``POST /rollout/generate``: one decoded item per output, tensors still in their envelopes.

        Raises:
            ServerUnreachableError: no answer.
            RolloutError: the server refused or failed; its own text is quoted.
        """
        import msgpack

        where = "POST /rollout/generate"
        status, raw = self._call("POST", "/rollout/generate", body)
        if status != http.client.OK:
            raise RolloutError(f"SGLang answered {status}: {_text(raw)}", where=where)
        try:
            items = msgpack.unpackb(raw, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RolloutError(f"the answer is no msgpack ({len(raw)} bytes): {error}", where=where) from error
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise RolloutError(f"the answer is a {type(items).__name__}, not a list of mappings", where=where)
        return items

    def control(self, operation: str, **values: Any) -> dict[str, Any]:
        """Run an operation of the server side; returns its answer.

        Raises:
            ServerUnreachableError: no answer.
            RolloutError: the operation failed; the text is the server side's.
        """
        body = {
            "serialized_named_tensors": [json.dumps({"op": operation, **values})],
            "load_format": CONTROL_FORMAT,
        }
        status, raw = self._call("POST", "/update_weights_from_tensor", body)
        try:
            answer: dict[str, Any] = json.loads(json.loads(raw)["message"])
            refusal = None if answer.pop("ok") else str(answer["error"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(f"SGLang answered {status}: {_text(raw)}", where=f"operation {operation!r}") from error
        if refusal is not None:
            raise RolloutError(refusal, where=f"operation {operation!r} in the SGLang server")
        return answer

    def weights_checksum(self, module: str) -> str:
        """SGLang's own sha256 over a module's weights (``POST /get_weights_checksum``).

        Raises:
            RolloutError: no answer, or no such module.
        """
        status, raw = self._call("POST", "/get_weights_checksum", {"module_names": [module]})
        try:
            checksum = json.loads(raw)[module]
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(f"SGLang answered {status}: {_text(raw)}", where="POST /get_weights_checksum") from error
        if checksum == _NO_MODULE:
            raise RolloutError(f"module {module!r}: {checksum}", where="POST /get_weights_checksum")
        return str(checksum)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        limit = timeout_s or self._timeout_s
        connection = http.client.HTTPConnection(_LOOPBACK, self._port, timeout=limit)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, body=payload, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError as error:
            raise ServerUnreachableError(
                f"SGLang did not answer within {limit:g} s", where=f"{method} {path}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            name = type(error).__name__
            raise ServerUnreachableError(f"no answer from SGLang: {name}: {error}", where=f"{method} {path}") from error
        finally:
            connection.close()


def _text(raw: bytes) -> str:
    """A server's answer for a message, shortened."""
    text = raw.decode(errors="replace").strip()
    return text if len(text) <= _QUOTED else text[:_QUOTED] + " ..."

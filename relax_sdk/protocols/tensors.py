"""Shape, dtype and finiteness of the tensors inside records, checked without importing torch.

A field is declared as ``Annotated[Tensor, TensorSpec("K T+1 N C", "float32")]``. Axis names are bound across the
fields of one record: the first field that uses ``K`` fixes it, and every later field has to agree. ``T+1`` means
one more than ``T``; a number stands for itself; ``...`` at the front means any leading axes.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

__all__ = ["Tensor", "TensorSpec", "dtype_name"]

_AXIS = re.compile(r"^(?:(?P<number>\d+)|(?P<name>[A-Z][A-Za-z]*)(?:\+(?P<plus>\d+))?)$")


def dtype_name(tensor: Any) -> str:
    """``"float32"`` for a tensor of ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a record's tensor field must look like.

    Args:
        axes: axis names separated by spaces, e.g. ``"K T+1 N C"``.
        dtypes: allowed dtype names separated by ``|``, e.g. ``"float32|bfloat16"``; empty allows any.
        finite: refuse NaN and infinities.
    """

    axes: str
    dtypes: str = ""
    finite: bool = True

    def check(self, field: str, value: Any, bound: dict[str, tuple[int, str]]) -> str | None:
        """Check one tensor and bind its axes.

        Args:
            field: the field's full name, for the message.
            value: the tensor.
            bound: axis name -> (size, field that fixed it); extended in place.

        Returns:
            None when the tensor fits, else one sentence that says what was expected and what came.
        """
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            return f"{field}: expected a tensor [{self.axes}], came {type(value).__name__}"
        problem = self._check_shape(field, tuple(value.shape), bound)
        if problem is not None:
            return problem
        if self.dtypes and dtype_name(value) not in self.dtypes.split("|"):
            return f"{field}: expected dtype {self.dtypes}, came {dtype_name(value)}"
        if self.finite and value.dtype.is_floating_point and not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).sum())
            return f"{field}: expected finite values, came {bad} of {value.numel()} NaN or infinite"
        return None

    def _check_shape(self, field: str, shape: tuple[int, ...], bound: dict[str, tuple[int, str]]) -> str | None:
        axes = self.axes.split()
        if axes and axes[0] == "...":
            axes = axes[1:]
            if len(shape) < len(axes):
                return f"{field}: expected shape [{self.axes}], came {list(shape)}"
            shape = shape[len(shape) - len(axes) :]
        if len(shape) != len(axes):
            return f"{field}: expected shape [{self.axes}], came {list(shape)}"
        for axis, size in zip(axes, shape, strict=True):
            match = _AXIS.match(axis)
            if match is None:
                raise ValueError(f"malformed axis {axis!r} in TensorSpec({self.axes!r})")
            if match["number"] is not None:
                if size != int(match["number"]):
                    return f"{field}: expected shape [{self.axes}], came {list(shape)}"
                continue
            base = size - int(match["plus"] or 0)
            known, owner = bound.setdefault(match["name"], (base, field))
            if known != base:
                plus = f"+{match['plus']}" if match["plus"] else ""
                return (
                    f"{field}: expected {axis} = {known + int(match['plus'] or 0)} "
                    f"({match['name']}{plus}, with {match['name']} = {known} from {owner}), came {size} "
                    f"in shape {list(shape)} of [{self.axes}]"
                )
        return None

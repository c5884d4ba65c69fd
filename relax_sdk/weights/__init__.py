"""What trainer and engine share about weights: LoRA layers, names, send buffers, checksums, host copies."""

from relax_sdk.weights.buffers import OpenBuffer, SendBuffer, buffer_for
from relax_sdk.weights.checksum import bytes_checksum, combine_checksums
from relax_sdk.weights.host import HostBlocks
from relax_sdk.weights.lora import (
    ADAPTER_NAME,
    inject_lora,
    is_lora_name,
    lora_shapes,
    merge_delta,
    to_peft_name,
    to_wire_name,
)

__all__ = [
    "ADAPTER_NAME",
    "HostBlocks",
    "OpenBuffer",
    "SendBuffer",
    "buffer_for",
    "bytes_checksum",
    "combine_checksums",
    "inject_lora",
    "is_lora_name",
    "lora_shapes",
    "merge_delta",
    "to_peft_name",
    "to_wire_name",
]

"""What trainer and engine must agree about weights: LoRA layers, their names, checksums."""

from relax_sdk.weights.checksum import TensorDigest, tensor_checksum
from relax_sdk.weights.lora import ADAPTER_NAME, inject_lora, is_lora_name, merge_delta, to_peft_name, to_wire_name

__all__ = [
    "ADAPTER_NAME",
    "TensorDigest",
    "inject_lora",
    "is_lora_name",
    "merge_delta",
    "tensor_checksum",
    "to_peft_name",
    "to_wire_name",
]

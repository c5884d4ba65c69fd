"""Weight sync: gather from the actor, stream to the engines, verify, commit or roll back."""

from relax_sdk.weight_sync.gather import WireWeights, strip_transport_wrappers
from relax_sdk.weight_sync.stream import StreamedSync

__all__ = ["StreamedSync", "WireWeights", "strip_transport_wrappers"]

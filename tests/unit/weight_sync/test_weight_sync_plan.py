"""How tensors are put into buckets."""

from __future__ import annotations

import pytest

from relax_sdk.weight_sync.plan import plan_buckets


@pytest.mark.parametrize(
    ("elements", "bucket", "counts"),
    [
        ([10] * 10, 120, [3, 3, 3, 1]),
        ([10] * 10, 40, [1] * 10),
        ([10, 100, 10, 10], 80, [1, 1, 2]),
        ([10] * 3, 10**6, [3]),
        ([0, 10, 0, 20, 20, 0], 80, [3, 1, 2]),
        ([5, 5, 10], 40, [2, 1]),
    ],
    ids=["several", "one each", "a large one", "all in one", "empty ones", "exact"],
)
def test_buckets(elements: list[int], bucket: int, counts: list[int]) -> None:
    listed = [(f"t{index}", (count,)) for index, count in enumerate(elements)]
    plan = plan_buckets(listed, dtype="float32", bucket_bytes=bucket)
    assert [span.count for span in plan.spans] == counts
    assert [span.first for span in plan.spans] == [sum(counts[:index]) for index in range(len(counts))]
    for span in plan.spans:
        assert span.bytes == 4 * sum(elements[span.first : span.first + span.count]) > 0
        assert span.bytes <= max(bucket, 4 * max(elements))
    assert plan.slot_bytes == max(span.bytes for span in plan.spans)
    assert plan.slots == min(2, len(counts))
    assert plan_buckets(listed, dtype="bfloat16", bucket_bytes=bucket).slot_bytes <= plan.slot_bytes

"""Metrics: one step record in; `metrics.jsonl`, TensorBoard events and the console line out. Loads no torch.

Left out on purpose: computing the metrics of training (they come from the trainer) and other tracking services.
"""

from relax_sdk.metrics.console import ConsoleSink, format_evaluation, format_rollout
from relax_sdk.metrics.curve import plot_curve
from relax_sdk.metrics.jsonl import JsonlSink, read_metrics
from relax_sdk.metrics.logger import MetricsLogger, MetricsSink, open_run_metrics
from relax_sdk.metrics.names import METRICS, STEP_KEY, Metric, check_names, find_metric
from relax_sdk.metrics.statistics import PairedDifference, group_statistics, paired_difference
from relax_sdk.metrics.tensorboard import TensorBoardSink

__all__ = [
    "METRICS",
    "STEP_KEY",
    "ConsoleSink",
    "JsonlSink",
    "Metric",
    "MetricsLogger",
    "MetricsSink",
    "PairedDifference",
    "TensorBoardSink",
    "check_names",
    "find_metric",
    "format_evaluation",
    "format_rollout",
    "group_statistics",
    "open_run_metrics",
    "paired_difference",
    "plot_curve",
    "read_metrics",
]

"""Checks during training that trainer and engine are still the same model."""

from nrl_models.watch.event import StepReport
from nrl_models.watch.finding import Cause, Finding, Level
from nrl_models.watch.monitor import Watch
from nrl_models.watch.step_metrics import Bars, StepMetrics, step_metrics
from nrl_models.watch.syncs import Sync

__all__ = ["Bars", "Cause", "Finding", "Level", "StepMetrics", "StepReport", "Sync", "Watch", "step_metrics"]

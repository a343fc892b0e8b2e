"""Checks during training that trainer and engine are still the same model."""

from nrl_models.deprecation import old_names
from nrl_models.watch.event import StepReport
from nrl_models.watch.finding import Cause, Finding, Severity
from nrl_models.watch.monitor import Watch
from nrl_models.watch.step_metrics import Bars, StepMetrics, step_metrics
from nrl_models.watch.syncs import Sync

__all__ = ["Bars", "Cause", "Finding", "Severity", "StepMetrics", "StepReport", "Sync", "Watch", "step_metrics"]

__getattr__ = old_names(__name__, {"Level": "Severity"})

"""Inference engines with a common interface: transformers, vLLM, a server over HTTP, and the trainer itself."""

from nrl_models.common.trust.servers import ENGINES
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import Capabilities, ModuleCall, RefitReport, Sample
from nrl_models.engines.start import start_engine

__all__ = ["ENGINES", "Capabilities", "Engine", "ModuleCall", "RefitReport", "Sample", "start_engine", "tensor_digest"]

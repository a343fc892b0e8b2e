"""vLLM as an engine, in this process or in a subprocess."""

from nrl_models.engines.vllm.vllm_engine import VLLMEngine
from nrl_models.engines.vllm.vllm_start import vllm_version

__all__ = ["VLLMEngine", "vllm_version"]

"""Load Hugging Face models for RL post-training, send their weights to the inference engine, and verify that trainer
and engine compute the same log-probabilities.

The public names are in `__init__.pyi`; each is imported when it is first used, so that importing this needs no torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

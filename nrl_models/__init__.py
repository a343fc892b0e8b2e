"""Load Hugging Face models for RL post-training, send their weights to the inference engine, and verify that trainer
and engine compute the same log-probabilities.

The public names are in `__init__.pyi`; each is imported when it is first used, so that importing this needs no torch.
"""

import lazy_loader

__version__ = "0.1.0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name.

    Raises:
        AttributeError: If the package has no public name like this.
    """
    try:
        return _imported(name)
    except AttributeError:
        if name in __all__:
            raise  # of the import
    from nrl_models.errors import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")

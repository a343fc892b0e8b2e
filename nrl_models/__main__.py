"""`python -m nrl_models` is `nrl-models`."""

from nrl_models.cli import app

if __name__ == "__main__":  # an engine's processes import this module again
    app()

"""`python -m nrl_models` is `nrl-models`."""

from nrl_models.cli import main

main()

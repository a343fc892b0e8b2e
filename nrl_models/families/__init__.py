"""One package a model family. `nrl_models.registry` says which architecture is where."""

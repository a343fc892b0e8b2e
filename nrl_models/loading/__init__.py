"""From a checkpoint to a model: configuration, class, options, skeleton, files, weights, placement."""

"""Components of a model: towers, decoder, routers."""

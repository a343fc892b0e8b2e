"""Our classes against transformers' own, on cheap checks."""

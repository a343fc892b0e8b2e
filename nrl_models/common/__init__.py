"""Building blocks of families: groups of linears, layouts, checkpoint files, configurations, forwards."""

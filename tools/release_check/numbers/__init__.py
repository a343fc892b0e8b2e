"""Names, dtypes and numbers of transformers' own classes, recorded to find silent changes."""

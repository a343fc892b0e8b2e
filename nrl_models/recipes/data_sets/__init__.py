"""Sources of rows: files, and data sets of the hub."""
